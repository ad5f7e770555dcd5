"""Models of transformers, from a checkpoint or from the user, in a floating type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_export.errors import UsageError, first_few
from attn_export.parts.whole_models.integer_checkpoint import integers_of
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.unit_weights import copy_by_unit, stored_weights

_DTYPES = ("float32", "float16", "bfloat16")
"""The types in which whole models are built."""


def load_model(model: Any, *, is_changed: bool = True) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a checkpoint or of the user, and notes on it.

    `is_changed`: Whether its weights are changed, so that all must be in memory.
    """
    from transformers import PreTrainedModel

    if isinstance(model, str | Path):
        checkpoint = read_checkpoint(Path(model))
        by_unit = not is_changed and checkpoint.is_by_unit
        loaded = checkpoint.load_by_unit() if by_unit else checkpoint.load()
        return loaded, (*checkpoint.notes, *_integer_notes(loaded))
    model = getattr(model, "module", model)  # of a Subject
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            "a whole model is the folder of a checkpoint or a model of transformers; got "
            f"{type(model).__name__}"
        )
    model.set_experts_implementation("eager")  # the others have no float64
    model.train(mode=False)
    return model, ()


def load_to_build(
    model: Any, dtype: str, *, is_changed: bool = True, is_captured: bool = True
) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a checkpoint or of the user in a type, as transformers runs it in it.

    `is_changed`: Whether its weights are changed, so that all must be in memory.
    `is_captured`: Whether a graph is made of it.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype of a whole model is {', '.join(_DTYPES)}; got {dtype!r}")
    how = f"built in {dtype}"
    if isinstance(model, str | Path):
        # In this type from the start, since some types round numbers of their own to their type.
        checkpoint, wanted = read_checkpoint(Path(model)), getattr(torch, dtype)
        own = checkpoint.config.dtype
        told = () if own in (None, wanted) else (f"the model is {_name(own)}, and {how}",)
        if (
            not is_changed
            and checkpoint.is_by_unit
            and not (is_captured and checkpoint.has_encoder)
        ):
            loaded = checkpoint.load_by_unit(wanted)
        else:
            checkpoint.config.dtype = wanted
            loaded = checkpoint.load()
        notes = *checkpoint.notes, *told, *_integer_notes(loaded)
    else:
        loaded, notes = in_dtype(*load_model(model), dtype=dtype, how=how)
    for name, weight in stored_weights(loaded) if dtype != "float32" else ():
        ends = torch.stack(torch.aminmax(weight)) if weight.numel() else weight
        if not ends.to(getattr(torch, dtype)).isfinite().all():
            raise UsageError(f"{name} has values that {dtype} does not hold; give another dtype")
    return loaded, notes


def _integer_notes(model: nn.Module) -> tuple[str, ...]:
    integers = integers_of(model)
    return () if integers is None else (integers.note,)


def in_dtype(
    model: Any, notes: tuple[str, ...], dtype: str, how: str = ""
) -> tuple[Any, tuple[str, ...]]:
    """Return the model in a floating type, and notes.

    `how`: What is done with it, for the note.
    """
    own, stored, wanted = type_of(model), set(model.state_dict()), getattr(torch, dtype)
    if dtype == own:
        return model, notes

    def dtype_of(name: str, x: torch.Tensor) -> torch.dtype:
        # transformers keeps what it computes, as the frequencies of rotary angles, in float32.
        is_stored = dtype == "float32" or name in stored
        return wanted if x.dtype == model.dtype and is_stored else x.dtype

    changed = copy_by_unit(model, dtype_of)  # the user's model must stay as it is
    return changed, (*notes, f"the model is {own}, and {how}")


def type_of(model: Any) -> str:
    """Return the name of the type of a model's weights."""
    return _name(model.dtype)


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


ADAPTER = "adapter_config.json"

_BESIDE = {ADAPTER: ("an adapter", "merge it with --adapter FOLDER")}
"""Files of a checkpoint that say what else belongs to the model, with what to do."""


def left_out_beside(folder: Path, adapter: Path | str | None = None) -> dict[str, str]:
    """Return what belongs to a model by other files of its folder, with what to do.

    `adapter`: The folder of an adapter that is merged.
    """
    return {
        f"{what} ({name})": advice
        for name, (what, advice) in _BESIDE.items()
        if (folder / name).exists() and not (adapter and name == ADAPTER)
    }


def left_out_of(model: nn.Module, run: Callable[[], object]) -> dict[str, str]:
    """Return the modules that do nothing in a run, such as towers of images, with what to do."""
    called: set[nn.Module] = set()
    hooks = [x.register_forward_pre_hook(lambda x, _: called.add(x)) for x in model.modules()]
    try:
        with torch.inference_mode():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    used = {id(weight) for module in called for weight in module.parameters(recurse=False)}
    names = [*_unused(model, called, used)]
    return {first_few(names): "export them by --module"} if names else {}


def _unused(
    module: nn.Module, called: set[nn.Module], used: set[int], path: str = ""
) -> Iterator[str]:
    """Yield the paths of modules of which no part was called, and no weight is that of another."""
    for name, child in module.named_children():
        if not called.isdisjoint(child.modules()):
            yield from _unused(child, called, used, f"{path}{name}.")
        # Some of a list, as experts, wait for other inputs; PyTorch's own use weights alone.
        elif isinstance(module, nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention):
            continue
        elif any(id(weight) not in used for weight in child.parameters()):
            yield path + name


def left_out_note(left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on what is not in the graphs."""
    return (f"left out, and not in the graphs: {'; '.join(left_out)}",) if left_out else ()
