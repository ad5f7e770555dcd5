"""Tensors that a module makes in one call and uses in the next, such as a mask that grows."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attn_export.export.module_state import preserved
from attn_export.export.subject import MOST_WORK, Subject
from attn_export.parity.draw import clamp_sizes

Kept = list[tuple[nn.Module, str]]
"""Parts of a module, and names of their tensors."""

LONGEST = 4096
"""The largest size at which a module is run to find what it keeps."""


def kept_between_calls(subject: Subject) -> Kept:
    """Return the tensors that a user's module makes anew where an axis is larger than they are."""
    dimensions = (size for _, _, held in kept_tensors(subject.module) for size in held.shape)
    most = max((size for size in dimensions if size < LONGEST), default=0)
    weights = sum(parameter.numel() for parameter in subject.module.parameters())
    found: Kept = []
    for label, size in subject.example_sizes.items():
        sizes = subject.sizes_with(clamp_sizes({label: max(most, size) + 1}, subject.bounds))
        too_much = weights * math.prod(sizes.values()) > MOST_WORK
        if label in subject.sums or not most or too_much:
            continue
        with contextlib.suppress(Exception):  # where the module ends, there is nothing to keep
            inputs = subject.tree.rebuild(subject.draw(sizes, "larger"))
            with torch.inference_mode():
                found += kept_by(subject.module, functools.partial(subject.module, **inputs))
    return found


def kept_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the buffers of a module and its tensors that are plain attributes."""
    for part in module.modules():
        for name, held in (*part._buffers.items(), *vars(part).items()):
            if isinstance(held, Tensor):
                yield part, name, held


def kept_by(module: nn.Module, run: Callable[[], object]) -> Kept:
    """Return the tensors that a call replaces, such as a mask that grows with its input.

    Args:
        module: The module; it is left as it was.
        run: Calls it, with inputs larger than those before.
    """
    before = {(id(part), name): held for part, name, held in kept_tensors(module)}
    with preserved(module):
        run()
        return [
            (part, name)
            for part, name, held in kept_tensors(module)
            if before.get((id(part), name), held) is not held
        ]


@contextlib.contextmanager
def without(module: nn.Module, kept: Kept) -> Iterator[None]:
    """Set kept tensors to None, as before the first call, and keep new ones as plain attributes.

    `torch.export` takes a buffer that a call registers for one of the size that it has.

    Args:
        module: The module; it is restored at the end of the block.
        kept: The tensors.
    """
    with preserved(module):
        for part in module.modules():
            attributes = vars(part)
            attributes["register_buffer"] = functools.partial(_set_plainly, part)
            empty = [name for name, held in part._buffers.items() if held is None]
            for name in (*empty, *(name for owner, name in kept if owner is part)):
                part._buffers.pop(name, None)
                attributes[name] = None
        yield


def _set_plainly(part: nn.Module, name: str, tensor: Tensor | None, **_: bool) -> None:
    vars(part)[name] = tensor
