"""Architectures of NVIDIA GPUs that a dry run can claim to have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from attn_export.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The properties of a card by which ONNX Runtime chooses kernels.

    Attributes:
        name: As in NVIDIA's documentation: ``"sm_80"``.
        card: A card of it.
        multiprocessors: The number that the card has.
        shared_per_block: The most bytes of shared memory that a block may ask for.
        shared_per_multiprocessor: The bytes of shared memory of a multiprocessor.
        memory: The card's memory in GiB.
    """

    name: str
    card: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    memory: int

    @property
    def capability(self) -> int:
        """The compute capability, times ten."""
        return int(self.name.removeprefix("sm_"))


KIB = 1024
ARCHITECTURES = (
    Architecture("sm_75", "T4", 40, 64 * KIB, 64 * KIB, 16),
    Architecture("sm_80", "A100", 108, 163 * KIB, 164 * KIB, 80),
    Architecture("sm_86", "A10", 72, 99 * KIB, 100 * KIB, 24),
    Architecture("sm_89", "L4", 58, 99 * KIB, 100 * KIB, 24),
    Architecture("sm_90", "H100", 132, 227 * KIB, 228 * KIB, 80),
    Architecture("sm_100", "B200", 148, 227 * KIB, 228 * KIB, 180),
)
"""Figures of the CUDA C++ Programming Guide, "Compute Capabilities", and of data sheets."""

DEFAULT = ("sm_80", "sm_90")
ALL = "all"


def architectures_named(names: Iterable[str]) -> tuple[Architecture, ...]:
    """Return the architectures of these names, each once; `DEFAULT` where there are none.

    Raises:
        UsageError: If there is no such architecture.
    """
    known = {one.name: one for one in ARCHITECTURES}
    wanted = tuple(dict.fromkeys(names)) or DEFAULT
    if ALL in wanted:
        return ARCHITECTURES
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"unknown architecture {name!r}; choose from {', '.join(known)}, {ALL}"
            )
    return tuple(known[name] for name in wanted)
