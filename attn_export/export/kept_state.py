"""Tensors that a module keeps between calls, such as a mask that grows with its input."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attn_export.cases.draw import clamp_sizes, may_try
from attn_export.export.module_state import preserve_state
from attn_export.export.subject import Subject

Kept = list[tuple[nn.Module, str]]
"""Submodules, each with the name of an attribute or buffer that holds a tensor."""

LONGEST = 4096
"""The largest dimension of a kept tensor that is tested for growth."""


def find_kept_tensors(subject: Subject) -> Kept:
    """Return the tensors that a user's module replaces when an axis becomes larger than them."""
    dimensions = (n for _, _, tensor in _tensor_attributes(subject.module) for n in tensor.shape)
    most = max((size for size in dimensions if size < LONGEST), default=0)
    weights = sum(parameter.numel() for parameter in subject.module.parameters())
    kept: Kept = []
    for label, size in subject.example_sizes.items():
        sizes = subject.sizes_with(clamp_sizes({label: max(most, size) + 1}, subject.bounds))
        if label in subject.sums or not most or not may_try(weights, sizes, subject.sums):
            continue
        with contextlib.suppress(Exception):  # the module does not accept such sizes
            inputs = subject.tree.rebuild(subject.draw(sizes, "larger"))
            run = functools.partial(subject.module, **inputs)
            with torch.inference_mode():
                kept += _replaced_tensors(subject.module, run)
    return kept


def _tensor_attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the buffers of a module and its tensors that are plain attributes."""
    for submodule in module.modules():
        for name, value in (*submodule._buffers.items(), *vars(submodule).items()):
            if isinstance(value, Tensor):
                yield submodule, name, value


def _replaced_tensors(module: nn.Module, run: Callable[[], object]) -> Kept:
    """Return the tensors that a call with larger inputs replaces, and restore the module."""
    before = {(id(owner), name): tensor for owner, name, tensor in _tensor_attributes(module)}
    with preserve_state(module):
        run()
        return [
            (owner, name)
            for owner, name, tensor in _tensor_attributes(module)
            if before.get((id(owner), name), tensor) is not tensor
        ]


@contextlib.contextmanager
def drop_kept_tensors(module: nn.Module, kept: Kept) -> Iterator[None]:
    """Set kept tensors and empty buffers to None, as before the first call, inside this block.

    Buffers that the module registers inside the block become plain attributes, since `torch.export`
    would fix the size of a buffer.
    """
    with preserve_state(module):
        for submodule in module.modules():
            attributes = vars(submodule)
            attributes["register_buffer"] = functools.partial(_set_attribute, submodule)
            empty = [name for name, buffer in submodule._buffers.items() if buffer is None]
            for name in (*empty, *(name for owner, name in kept if owner is submodule)):
                submodule._buffers.pop(name, None)
                attributes[name] = None
        yield


def _set_attribute(submodule: nn.Module, name: str, tensor: Tensor | None, **_: bool) -> None:
    vars(submodule)[name] = tensor
