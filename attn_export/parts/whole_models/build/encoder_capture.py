"""A model of transformers without caches, or the encoder for a decoder, with our attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attn_export.errors import ExportError, one_line
from attn_export.parts.whole_models.build.attention import Call, OwnAttentionError, attending
from attn_export.parts.whole_models.build.own_attention import own_attention
from attn_export.parts.whole_models.build.single_nodes import SingleNodes
from attn_export.parts.whole_models.model_caches import cache_name


class CapturedEncoder(nn.Module):
    """A model with its own inputs, positions and masks.

    `own`: Calls it as transformers runs it; `own.model` is the model.
    """

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        model: Any = own.model
        self.own, self._nodes = own, SingleNodes(model)

    def forward(self, **inputs: Tensor) -> list[Tensor]:
        """Return the outputs; `inputs` are those of the model."""
        return self._run(Call(None), inputs)

    def _run(self, call: Call, inputs: dict[str, Tensor]) -> list[Tensor]:
        own: Any = self.own
        model = own.model
        with attending(model, call), own_attention(model), self._nodes.inside(model):
            outputs: list[Tensor] = own(**inputs)
        return outputs

    def prove(self, example: dict[str, Tensor], layers: int) -> bool:
        """Refuse a model whose layers do not call our function once each.

        `example`: Inputs of `forward`.

        Returns:
            Whether a layer hides tokens that are no padding, as a window does.
        """
        own: Any = self.own
        kind, call = own.model.config.model_type, Call(None)
        try:
            with torch.inference_mode():
                self._nodes.prove(lambda: self._run(Call(None), example)[0])
                self._run(call, example)
        except Exception as error:  # as various as the models
            raise ExportError(f"{kind} does not run: {one_line(error)}") from error
        if len(call.attended) != layers:
            raise OwnAttentionError(kind, layers, len(call.attended))
        return call.hides


class CrossStates(nn.Module):
    """The keys and values that the layers of a decoder see of the encoder's tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> list[Tensor]:
        """Return ``cross_key_0 [B, H, T, D]``, ``cross_value_0``, and so on.

        The decoder runs on one token, of which nothing else is used.
        """
        model: Any = self.model
        batch = next(iter(inputs.values())).shape[0]
        start = torch.zeros(batch, 1, dtype=torch.int64)
        outputs = model(**inputs, decoder_input_ids=start, use_cache=True)
        cache = getattr(outputs, cache_name(model))
        layers = cache.cross_attention_cache.layers
        return [x for layer in layers for x in (layer.keys, layer.values)]
