"""Weights of a module that are in the files of a checkpoint, while it is captured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from attn_export.graph.unread import Unread, unread_at


class UnreadWeights:
    """Weights that are placeholders, with functions that read rows of each in its type.

    Attributes:
        alike: Returns a context in which others may stand in for them, to save time.
    """

    def __init__(
        self, readers: Sequence[tuple[nn.Parameter, Callable[[slice], Tensor]]],
        alike: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._readers, self.alike = readers, alike

    @contextlib.contextmanager
    def at_addresses(self) -> Iterator[None]:
        """Let the weights be like others inside this block, but for their numbers."""
        before = [weight.data for weight, _ in self._readers]
        unread = [_unread(weight, read) for weight, read in self._readers]
        for (weight, _), each in zip(self._readers, unread, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they cannot be written
                flat = torch.frombuffer(each.pages, dtype=weight.dtype)
            weight.data = flat.view(weight.shape)
        try:
            yield
        finally:
            for (weight, _), data in zip(self._readers, before, strict=True):
                weight.data = data


def _unread(weight: Tensor, read: Callable[[slice], Tensor]) -> Unread:
    return Unread(weight.nbytes, lambda rows: read(rows).contiguous().view(torch.uint8).numpy())


class ReadWeights(TorchDispatchMode):
    """Mode in which each operation reads the weights that it takes, and drops them after it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        args, kwargs = tree_map_only(Tensor, _read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _read(tensor: Tensor) -> Tensor:
    unread = unread_at(tensor.data_ptr()) if tensor.numel() else None
    if unread is None:
        return tensor
    array = tensor.detach().view(_BITS[tensor.itemsize]).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not written
        return torch.from_numpy(unread.view(array)).view(tensor.dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of numpy of the same size as those of tensors, some of which numpy does not have."""
