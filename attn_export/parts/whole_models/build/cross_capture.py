"""The decoder of an encoder-decoder as one module with caches in place.

Legend: B batch, L new tokens, S capacity of the caches, T tokens of the encoder, H heads, D head
width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from attn_export.attention import functional
from attn_export.errors import ExportError
from attn_export.parts.whole_models.build.attention import Call
from attn_export.parts.whole_models.build.capture import CapturedDecoder, InPlaceLayer
from attn_export.parts.whole_models.model_caches import cache_name

ENCODER_MASK = "encoder_attention_mask"
"""The input that says which tokens of the encoder are no padding."""


class _CrossLayer(InPlaceLayer):  # type: ignore[no-untyped-call]
    """Keys and values of the encoder's tokens, `[B, H, T, D]`, which stay as they are."""

    def get_seq_length(self) -> int:
        """Return that there are some."""
        return 1


class CapturedCrossDecoder(CapturedDecoder):
    """A decoder that also takes the keys and values of the encoder's tokens.

    They are ``cross_key_0 [B, H, T, D]``, ``cross_value_0``, and so on.
    """

    def _logits(self, call: Call, ids: Tensor, own: Cache, caches: Mapping[str, Tensor]) -> Tensor:
        keys = [x for name, x in caches.items() if name.startswith("cross_key_")]
        values = [x for name, x in caches.items() if name.startswith("cross_value_")]
        call.encoded, call.crossed = caches.get(ENCODER_MASK), keys
        layers: Any = [_CrossLayer(*pair) for pair in zip(keys, values, strict=True)]
        model: Any = self.model
        config = getattr(model.config, "encoder", model.config)
        states = keys[0].new_zeros(ids.shape[0], keys[0].shape[2], config.hidden_size)
        length: Any = call.past_length
        with self._at_positions(functional.positions(length, ids.shape[1])):
            logits: Tensor = model(
                decoder_input_ids=ids, attention_mask=call.encoded, use_cache=True,
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                **{cache_name(model): EncoderDecoderCache(own, Cache(layers=layers))},
            ).logits  # fmt: skip
        return logits

    def prove(self, example: Mapping[str, Tensor]) -> None:
        """Refuse a model that attends by itself, or that counts positions in another way."""
        super().prove(example)
        if self.reads_length:
            raise ExportError(
                f"{self.model.config.model_type} counts positions for the whole batch; batches of "
                "prompts of unequal length are not supported for it"
            )

    @contextlib.contextmanager
    def _at_positions(self, positions: Tensor) -> Iterator[None]:
        """Give embeddings and biases of positions those of each batch element, `[B, L]`.

        transformers counts them for the whole batch.
        """
        model: Any = self.model
        with contextlib.ExitStack() as stack:
            for part in model.get_decoder().modules():
                accepted = inspect.signature(part.forward).parameters.keys()
                if "position_ids" in accepted and not accepted.isdisjoint(_LENGTHS):
                    part.forward = _embedded(part.forward, positions)
                    stack.callback(delattr, part, "forward")
                if getattr(part, "has_relative_attention_bias", False):
                    part.compute_bias = _biased(part.compute_bias, positions)
                    stack.callback(delattr, part, "compute_bias")
            yield


_LENGTHS = ("cache_length", "past_key_values_length")
"""The argument of embeddings that holds the number of keys; the latter before transformers 5.24."""


def _embedded(embed: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """Return the embedding of positions, `[B, L, E]`."""
    return lambda ids, *_, **__: embed(ids, position_ids=positions.flatten()).reshape(
        *positions.shape, -1
    )


def _biased(bias: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """Return the bias `[B, H, L, S]` of a causal decoder, which depends on distances alone."""

    def moved(_: int, keys: int, *__: Any, **___: Any) -> Tensor:
        last = bias(1, keys, past_seen_tokens=keys - 1)[0, :, 0]  # [H, S], of the last query
        at = torch.arange(keys) + (keys - 1 - positions)[..., None]  # [B, L, S]
        return last[:, at.clamp(max=keys - 1)].transpose(0, 1)

    return moved
