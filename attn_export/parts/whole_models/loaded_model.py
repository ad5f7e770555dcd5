"""Models of transformers, from a checkpoint or from the user, in a floating type."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from attn_export.errors import UsageError
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint


def load_model(model: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a checkpoint or of the user, and notes on it."""
    from transformers import PreTrainedModel

    if isinstance(model, str | Path):
        checkpoint = read_checkpoint(Path(model))
        return checkpoint.load(), checkpoint.notes
    model = getattr(model, "module", model)  # of a Subject
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            "a whole model is the folder of a checkpoint or a model of transformers; got "
            f"{type(model).__name__}"
        )
    model.set_experts_implementation("eager")  # the others have no float64
    model.train(mode=False)
    return model, ()


def in_dtype(
    model: Any, notes: tuple[str, ...], dtype: str, how: str
) -> tuple[Any, tuple[str, ...]]:
    """Return the model in a floating type, and notes.

    `how`: What is done with it, for the note.
    """
    own = str(model.dtype).removeprefix("torch.")
    if dtype == own:
        return model, notes
    changed = copy.deepcopy(model)  # the user's model must stay as it is
    for tensor in (*changed.parameters(), *changed.buffers()):
        # transformers keeps some buffers, as the frequencies of rotary angles, in float32.
        if tensor.dtype == model.dtype:
            tensor.data = tensor.data.to(getattr(torch, dtype))
    return changed, (*notes, f"the model is {own}, and {how}")
