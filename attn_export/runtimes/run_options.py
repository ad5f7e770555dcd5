"""The options of a job's runs: made once, they travel from the command line to the gate."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

from attn_export.errors import UsageError, printable
from attn_export.quality import Budget
from attn_export.runtimes.catalogue import DEFAULT, all_names, runtime, runtimes_of
from attn_export.runtimes.protocol import Limits, Runtime

_ALWAYS_REQUIRED = "ort-cpu"
ALL = "all"


class Progress:
    """Receiver of a job's progress, which it ignores."""

    def phase(self, text: str) -> None:
        """Start a phase of the job, described by `text`."""

    def expect(self, steps: int) -> None:
        """Increase the number of expected steps."""

    def advance(self, text: str) -> None:
        """Count one step, described by `text`."""

    def hidden(self) -> contextlib.AbstractContextManager[object]:
        """Hide the bar in a block that writes to the terminal, or whose processes do."""
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Gate:
    """Tolerances of the user, checked in addition to the rule: |r − e| ≤ atol + rtol·|e|.

    Here r is the runtime's output and e is eager's; None counts as 0. There is no gate if both are
    None.
    """

    atol: float | None = None
    rtol: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} must be a finite number, at least 0; got {value}")


class RunKeywords(TypedDict, total=False):
    """The keywords of `RunOptions.of`, which `build`, `verify` and `assert_parity` take, too."""

    runtimes: Sequence[str]
    require: Sequence[str]
    atol: float | None
    rtol: float | None
    budgets: Sequence[str]
    search_more: bool
    memory: str | None
    whole: bool
    limits: Limits | None
    progress: Progress | None


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How the graphs of a job are run and judged.

    Attributes:
        runtimes: The runtimes, in order.
        required: The names of the runtimes that must run at least one graph.
        unasked: The names of those that nobody asked for, and that reports leave out if they are
            not there.
        budgets: Limits for the error of a quantised model against the float model.
        search_more: Whether the search for causes has no end but its own.
        limits: The limits of each runtime's process.
    """

    runtimes: tuple[Runtime, ...]
    required: frozenset[str]
    gate: Gate = Gate()
    budgets: tuple[Budget, ...] = ()
    search_more: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits.default)
    progress: Progress = dataclasses.field(default_factory=Progress)
    unasked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, made: RunOptions | None = None, /, **keywords: Unpack[RunKeywords]) -> RunOptions:
        """Return the options of a job: `made` for one that runs in another, or new ones."""
        if made is not None and keywords:
            raise TypeError(f"{', '.join(keywords)}: give `run` or keywords, not both")
        return made or cls._new(**keywords)

    @classmethod
    def _new(
        cls,
        *,
        runtimes: Sequence[str] = (),
        require: Sequence[str] = (),
        atol: float | None = None,
        rtol: float | None = None,
        budgets: Sequence[str] = (),
        search_more: bool = False,
        memory: str | None = None,
        whole: bool = False,
        limits: Limits | None = None,
        progress: Progress | None = None,
    ) -> RunOptions:
        """Return checked options, of the words that the command line and `docs/api.md` explain."""
        # Runtimes that `DEFAULT` or "all" adds may be missing: most machines have no GPU.
        excluded = [runtime(name[1:]).name for name in runtimes if name.startswith("-")]
        known = [name for name in all_names() if name not in excluded] if ALL in runtimes else []
        named = [name for name in runtimes if name != ALL and not name.startswith("-")]
        chosen = [*known, *named] or DEFAULT
        limits = limits or Limits.default()
        if memory is not None:
            limits = dataclasses.replace(limits, memory_mib=_mib(memory))
        if whole:
            limits = dataclasses.replace(limits, runs_whole=True)
        return cls(
            tuple(_by_name([*chosen, *require]).values()),
            frozenset(_by_name([*named, *require, _ALWAYS_REQUIRED])),
            Gate(atol, rtol), tuple(map(Budget.parse, budgets)), search_more,
            limits, progress or Progress(),
            frozenset(DEFAULT).difference(known, named, require),
        )  # fmt: skip


_UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}

_LEAST_MIB = 256
"""The least memory of a runtime's process, of which importing its SDK takes a part."""


def _mib(text: str) -> int:
    """Return a size in MiB of a text such as ``8GiB``."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([MG]i?B)", text)
    mib = int(float(found[1]) * _UNITS[found[2]] / 2**20) if found else 0
    if mib < _LEAST_MIB:
        raise UsageError(
            f"memory is a size of at least {_LEAST_MIB}MiB, as 8GiB; got {printable(text, 40)}"
        )
    return mib


def _by_name(names: Iterable[str]) -> dict[str, Runtime]:
    return {runtime.name: runtime for name in names for runtime in runtimes_of(name)}
