"""The heap of GNU's C library, which keeps memory that was freed; elsewhere nothing is done."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_MOST_HEAPS = -8
"""The number of the option of `mallopt` that limits heaps, M_ARENA_MAX."""


def use_one_heap() -> None:
    """Let all threads have one heap, since each would keep what it freed in its own.

    For threads of which one works at a time, so that none waits for another.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_MOST_HEAPS, 1)


def give_back() -> None:
    """Give memory that was freed back to the system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> Any:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "malloc_trim") else None
