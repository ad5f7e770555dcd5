"""Models of transformers, from a checkpoint or from the user, in a floating type."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from attn_export.errors import UsageError
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint

_DTYPES = ("float32", "float16", "bfloat16")
"""The types in which whole models are built."""


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


def load_to_build(model: Any, dtype: str) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a checkpoint or of the user in a type, as transformers runs it in it."""
    if dtype not in _DTYPES:
        raise UsageError(f"dtype of a whole model is {', '.join(_DTYPES)}; got {dtype!r}")
    how = f"built in {dtype}"
    if isinstance(model, str | Path):
        # In this type from the start, since some types round numbers of their own to their type.
        checkpoint, wanted = read_checkpoint(Path(model)), getattr(torch, dtype)
        own, checkpoint.config.dtype = checkpoint.config.dtype, wanted
        told = () if own in (None, wanted) else (f"the model is {_name(own)}, and {how}",)
        loaded, notes = checkpoint.load(), (*checkpoint.notes, *told)
    else:
        loaded, notes = in_dtype(*load_model(model), dtype=dtype, how=how)
    for name, weight in loaded.named_parameters() if dtype != "float32" else ():
        if not weight.isfinite().all():
            raise UsageError(f"{name} has values that {dtype} does not hold; give another dtype")
    return loaded, notes


def in_dtype(
    model: Any, notes: tuple[str, ...], dtype: str, how: str = ""
) -> tuple[Any, tuple[str, ...]]:
    """Return the model in a floating type, and notes.

    `how`: What is done with it, for the note.
    """
    own = type_of(model)
    if dtype == own:
        return model, notes
    changed = copy.deepcopy(model)  # the user's model must stay as it is
    stored = set(changed.state_dict())
    for name, tensor in (*changed.named_parameters(), *changed.named_buffers()):
        # transformers keeps what it computes, as the frequencies of rotary angles, in float32.
        if tensor.dtype == model.dtype and (dtype == "float32" or name in stored):
            tensor.data = tensor.data.to(getattr(torch, dtype))
    return changed, (*notes, f"the model is {own}, and {how}")


def type_of(model: Any) -> str:
    """Return the name of the type of a model's weights."""
    return _name(model.dtype)


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
