"""A decoder of transformers with our attention as one module with caches in place.

Caches are written from `past_length` on.

Legend: B batch, L new tokens, S capacity of the caches, H query heads, Hkv key/value heads, D head
width, Dv value head width, K positions whose logits are wanted.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from attn_export.attention import functional, onnx_attention
from attn_export.errors import ExportError, WeightsError, one_line
from attn_export.parts.whole_models.build.attention import CALL, Call, OwnAttentionError, attending
from attn_export.parts.whole_models.build.part import ids_beside, passing
from attn_export.parts.whole_models.build.single_nodes import SingleNodes
from attn_export.parts.whole_models.loaded_model import type_of
from attn_export.parts.whole_models.model_caches import cache_name

_MANY = 2**17
"""A number of keys at which layers that scale by it have another factor."""

_STEPS = 5
"""The number of tokens that are decoded across a size."""


class InPlaceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, `[B, Hkv, S, D]`, which grow within their buffers."""

    is_compileable, is_sliding = True, False

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of the new tokens, and return all in the model's type."""
        call, stored = CALL.get(), self.keys.dtype
        length = None if call.appends else call.past_length
        self.keys = onnx_attention.append(self.keys, key_states.to(stored), length)
        self.values = onnx_attention.append(self.values, value_states.to(stored), length)
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def get_seq_length(self) -> Any:
        """Return how many keys there are. The mask, which adds them itself, does not read it."""
        return CALL.get().seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the first one."""
        return self.keys.shape[2] + (query_length if CALL.get().appends else 0), 0

    def get_max_length(self) -> int:
        """Return that there is no maximum."""
        return -1


class CapturedDecoder(nn.Module):
    """A decoder with caches in place, its own positions and masks, and no input for padding.

    Its model is as it was between runs.

    Attributes:
        reads_length: Whether the model reads how many keys the cache holds, for more than masks and
            positions. As transformers pads on the left, that is the longest past of the batch.
        kv_scales: What rounds keys and values for the caches, if these have a narrower type.
    """

    kv_scales: Any = None
    _token = 0

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.reads_length = model, False
        self._nodes = SingleNodes(model)

    def forward(
        self, input_ids: Tensor | None = None, hidden_states: Tensor | None = None,
        past_length: Tensor | None = None, logit_index: Tensor | None = None, **caches: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Return logits `[B, K, V]`, or hidden states, then the written keys and values by layer.

        `input_ids`: int64 `[B, L]`.
        `hidden_states`: `[B, L, E]` in their place, if the first layer is not there.
        `past_length`: int64 `[B]`; None if caches are not written in place, but grow.
        `logit_index`: The positions among the new tokens, int64 `[B, K]`; all if None.
        `caches`: ``past_key_0 [B, Hkv, S, D]``, ``past_value_0 [B, Hkv, S, Dv]``, and so on.
        """
        tokens = hidden_states if input_ids is None else input_ids
        assert tokens is not None  # there is one of them
        call = _call(past_length, caches)
        if self.reads_length and call.past_length is not None:
            call.seen = call.past_length.max()
        return self._run(call, tokens, logit_index, caches)

    def _run(
        self, call: Call, tokens: Tensor, index: Tensor | None, caches: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Return the outputs of ids `[B, L]`, or of hidden states `[B, L, E]`."""
        numbers = [int(name.split("_")[2]) for name in caches if name.startswith("past_key_")]
        layers: Any = {
            layer: InPlaceLayer(caches[f"past_key_{layer}"], caches[f"past_value_{layer}"])
            for layer in numbers
        }
        # Masks ask layers that are not in the part for their sizes, which are the same.
        config: Any = self.model.config
        count = max(config.get_text_config().num_hidden_layers, len(layers))
        every: Any = [layers.get(layer, layers[numbers[0]]) for layer in range(count)]
        nodes = self._nodes.inside(self.model)
        given = tokens if tokens.is_floating_point() else None
        ids = tokens if given is None else ids_beside(given, self._token)
        with attending(self.model, call), nodes, self._cut(index, call), passing(given) as passed:
            out = self._logits(call, ids, Cache(layers=every), caches)
        out = out if passed.found is None else passed.found
        return [out, *(x for layer in layers.values() for x in (layer.keys, layer.values))]

    def _logits(self, call: Call, ids: Tensor, own: Cache, _: Mapping[str, Tensor]) -> Tensor:
        """Return what the model gives for the new tokens; `own` are the caches of their layers."""
        model: Any = self.model
        length: Any = call.past_length
        logits: Tensor = model(
            input_ids=ids, use_cache=True, position_ids=functional.positions(length, ids.shape[1]),
            **{cache_name(model): own},
        ).logits  # fmt: skip
        return logits

    @contextlib.contextmanager
    def _cut(self, index: Tensor | None, call: Call) -> Iterator[None]:
        """Reduce what the output layer takes to the positions whose logits are wanted."""
        if index is None:
            yield
            return

        def cut(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = given[0]
            call.cut += 1
            wanted = index[..., None].expand(-1, -1, hidden.shape[-1])
            return (hidden.gather(1, wanted), *given[1:])

        model: Any = self.model
        head = model.get_output_embeddings()
        handle = head.register_forward_pre_hook(cut)
        try:
            yield
        finally:
            handle.remove()

    def prove(self, example: Mapping[str, Tensor]) -> None:
        """Refuse a model that attends without calling our function once in each layer.

        `example`: Inputs of `forward`.
        """
        kind = self.model.config.model_type
        is_plain = "cross_key_0" not in example
        if is_plain and "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ExportError(f"{kind} takes no position_ids, which caches in place need")
        self._nodes.prove(lambda: self._tried(example, 0)[1])
        call, logits = self._tried(example, 0)
        layers, calls = _layers(example, "past_key_", "cross_key_"), len(call.attended)
        if calls != layers or len(set(map(id, call.attended))) != layers:
            raise OwnAttentionError(kind, layers, calls)
        if not all(mask.all() for mask in call.padding):
            raise ExportError(f"{kind} masks padding by itself, which the graph does not know")
        if "logit_index" in example and call.cut != 1:
            raise ExportError(
                f"{kind} has an output layer of its own, so logits of single positions cannot be "
                "cut; give --all-logits"
            )
        if not logits.isfinite().all():
            raise ExportError(f"{kind} overflows in {type_of(self.model)}; give another dtype")
        # Some layers scale by the number of keys that transformers counts for the whole batch.
        _, others = self._tried(example, _MANY)
        self.reads_length = not torch.equal(logits, others)
        self._token = 1
        if not torch.equal(logits, self._tried(example, 0)[1]):
            raise ExportError(f"{kind} gives layers more than hidden states; leave out --layers")
        self._token = 0

    def prove_decode(
        self, caches: Mapping[str, Tensor], sizes: Iterable[int], vocabulary: int
    ) -> None:
        """Refuse a model that depends on more than its caches and the positions.

        Two prompts, of two lengths, are decoded together from empty caches, once across each size,
        and compared with what transformers' `generate` makes of the same tokens. Cases have random
        caches, and would not show it.

        `caches`: Of any number of batch elements and slots.
        """
        kind, random = self.model.config.model_type, torch.Generator().manual_seed(0)
        for size in sizes:
            prompt = max(size - 2, 2)
            # Ids with a meaning are first, and some have embeddings of 0, which tie routers.
            shape = 2, prompt + _STEPS
            ids = torch.randint(min(8, vocabulary // 2), vocabulary, shape, generator=random)
            short = prompt if self.reads_length else (prompt + 1) // 2
            try:
                with torch.inference_mode():
                    wanted = _generated(self.model, ids, short, prompt)
                    found = self._decoded(ids, short, prompt, caches)
                    wrong = next((n for n, x in enumerate(wanted) if not _near(next(found), x)), -1)
            except WeightsError:
                raise
            except Exception as error:  # as various as the models
                raise ExportError(f"{kind} cannot be decoded: {one_line(error)}") from error
            if wrong >= 0:
                raise ExportError(
                    f"{kind} depends on more than its caches and positions: at token "
                    f"{prompt + wrong} transformers' generate gives other logits than a decode "
                    "from an empty cache"
                )

    def _decoded(
        self, ids: Tensor, short: int, prompt: int, caches: Mapping[str, Tensor]
    ) -> Iterator[Tensor]:
        """Yield the logits `[B, V]` of each step; the second prompt has the last `short` ids."""
        starts, logits, held = torch.tensor([0, prompt - short]), [], []
        for row, start in enumerate(starts.tolist()):  # each alone, as some see padding
            new = ids[row : row + 1, start:prompt]
            empty = [x.new_zeros(1, x.shape[1], ids.shape[1], x.shape[3]) for x in caches.values()]
            last, *filled = self._step(new, torch.zeros(1, dtype=torch.int64), caches, empty)
            logits.append(last)
            held.append(filled)
        yield torch.cat(logits)
        written = [torch.cat(rows) for rows in zip(*held, strict=True)]
        for at in range(prompt, ids.shape[1]):
            last, *written = self._step(ids[:, at : at + 1], at - starts, caches, written)
            yield last

    def _step(
        self, ids: Tensor, past: Tensor, names: Iterable[str], caches: Sequence[Tensor]
    ) -> list[Tensor]:
        index = torch.full((len(ids), 1), ids.shape[1] - 1)
        given = dict(zip(names, caches, strict=True))
        logits, *written = self(ids, past_length=past, logit_index=index, **given)
        return [logits[:, 0], *written]

    def _tried(self, example: Mapping[str, Tensor], seen: int) -> tuple[Call, Tensor]:
        """Return a run and its logits; `seen` is what the cache says that it holds."""
        given = dict(example)
        call = _call(given.pop("past_length", None), given)
        call.seen = seen
        try:
            with torch.inference_mode():
                logits, *_ = self._run(
                    call, given.pop(next(iter(given))), given.pop("logit_index", None), given
                )
        except WeightsError:
            raise
        except Exception as error:  # as various as the models
            raise ExportError(
                f"{self.model.config.model_type} does not run with a cache in place; models whose "
                "decoders need something else are not supported"
            ) from error
        return call, logits


def _generated(model: Any, ids: Tensor, short: int, prompt: int) -> Sequence[Tensor]:
    """Return the logits `[B, V]` of the steps in which transformers' `generate` gives these ids."""

    def force(given: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf).scatter(1, ids[:, given.shape[1], None], 0.0)

    mask = torch.ones(2, prompt, dtype=torch.int64)
    mask[1, : prompt - short] = 0
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=ids.shape[1] - prompt, do_sample=False, num_beams=1, pad_token_id=0,
        eos_token_id=model.config.get_text_config(decoder=True).vocab_size,  # none ends it
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    found: Sequence[Tensor] = model.generate(
        ids[:, :prompt], attention_mask=mask, logits_processor=[force], generation_config=settings
    ).logits
    return found


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether logits `[B, V]` in float32 differ by what rounding explains."""
    return bool(((found - wanted).norm(dim=-1) <= 1e-3 * wanted.norm(dim=-1)).all())


def _call(past_length: Tensor | None, caches: Mapping[str, Tensor]) -> Call:
    """Return a run; without lengths, all keys of the caches are valid, and new ones follow them."""
    if past_length is not None:
        return Call(past_length)
    past = next(x for name, x in caches.items() if name.startswith("past_key_"))
    return Call(torch.full((past.shape[0],), past.shape[2]), appends=True)


def _layers(caches: Mapping[str, Tensor], *names: str) -> int:
    return sum(name.startswith(names) for name in caches)
