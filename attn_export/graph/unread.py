"""Arrays whose numbers lie in files, and are read when they are written.

Before, an array has its address, shape and strides, but takes no memory: its pages are never there.
Views of it are known by their addresses.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import as_strided

Read = Callable[[], np.ndarray]
"""Returns an array with its numbers."""

_ALL, _FIRST = slice(None), slice(1)


class Unread:
    """An array of a number of bytes that is not in memory.

    `read`: Returns the numbers of some rows, a contiguous array of any shape.

    Attributes:
        pages: Its address space, in which all reads find zeros.
    """

    def __init__(self, size: int, read: Callable[[slice], np.ndarray]) -> None:
        # What cannot be written counts towards no limit of memory.
        self.pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._read, self._size = read, size
        self.start: int = _address(np.frombuffer(self.pages, np.uint8))
        _UNREAD[self.start] = self

    def holds(self, address: int) -> bool:
        """Return whether an address is in it."""
        return self.start <= address < self.start + self._size

    def view(self, like: np.ndarray) -> np.ndarray:
        """Return the view of the numbers that an array is of the address space."""
        flat = self._read(_ALL).reshape(-1).view(like.dtype)
        first = (_address(like) - self.start) // like.itemsize
        return as_strided(flat[first:], like.shape, like.strides, writeable=False)

    def sign(self, like: np.ndarray) -> tuple[object, ...]:
        """Return what views of equal numbers have in common, of which little is read."""
        return self._read(_FIRST).tobytes(), _address(like) - self.start, like.strides


_UNREAD: WeakValueDictionary[int, Unread] = WeakValueDictionary()
"""All that are alive, by their address."""


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def unread_at(address: int) -> Unread | None:
    """Return the unread array at an address, if there is one."""
    return next((x for x in _UNREAD.values() if x.holds(address)), None)


def reader(array: np.ndarray) -> Read:
    """Return a function that gives an array with its numbers, and keeps what it needs."""
    unread = unread_at(_address(array))
    return (lambda: array) if unread is None else (lambda: unread.view(array))


def _unread_of(tensor: ir.TensorProtocol) -> Unread | None:
    """Return the unread array that a tensor is a view of, if its numbers are not in memory."""
    return None if _is_elsewhere(tensor) else unread_at(_address(tensor.numpy()))


def unread_sign(tensor: ir.TensorProtocol) -> tuple[object, ...] | None:
    """Return the sign of a tensor whose numbers are not in memory; None for others."""
    unread = _unread_of(tensor)
    return None if unread is None else unread.sign(tensor.numpy())


def read_when_needed(model: ir.Model) -> None:
    """Let initialisers that are unread arrays be read each time that their numbers are needed."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and _unread_of(tensor) is not None:
            value.const_value = lazy(name, tensor.dtype, tensor.shape, reader(tensor.numpy()))


def lazy(name: str, dtype: ir.DataType, shape: Iterable[Any], read: Read) -> ir.LazyTensor:
    """Return a tensor that is computed each time that it is read."""
    return ir.LazyTensor(
        lambda: ir.tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name
    )


def _is_elsewhere(tensor: ir.TensorProtocol) -> bool:
    return not _UNREAD or isinstance(tensor, ir.LazyTensor | ir.ExternalTensor)
