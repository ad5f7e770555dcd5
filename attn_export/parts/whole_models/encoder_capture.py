"""A model of transformers without caches as one module whose attention is ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attn_export.errors import ExportError, one_line
from attn_export.parts.whole_models.model_capture import Call, attending


class CapturedEncoder(nn.Module):
    """A model with its own inputs, positions and masks.

    `outputs`: The fields of its output that are returned, in their order.
    """

    def __init__(self, model: PreTrainedModel, outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.outputs = model, tuple(outputs)
        accepted = inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in accepted else {}

    def forward(self, **inputs: Tensor) -> list[Tensor]:
        """Return the outputs; `inputs` are those of the model."""
        return self._run(Call(None), inputs)

    def _run(self, call: Call, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        model: Any = self.model
        with attending(self.model, call):
            result = model(**inputs, **self._options)
        return [result[name] for name in self.outputs]

    def prove(self, example: Mapping[str, Tensor], layers: int) -> bool:
        """Refuse a model whose layers do not call our function once each.

        `example`: Inputs of `forward`.

        Returns:
            Whether a layer hides tokens that are no padding, as a window does.
        """
        kind, call = self.model.config.model_type, Call(None)
        try:
            with torch.inference_mode():
                self._run(call, example)
        except Exception as error:  # as various as the models
            raise ExportError(f"{kind} does not run: {one_line(error)}") from error
        if len(call.attended) != layers:
            raise ExportError(
                f"{kind} has attention of its own: of {layers} layers, {len(call.attended)} call "
                "transformers' AttentionInterface"
            )
        return call.hides
