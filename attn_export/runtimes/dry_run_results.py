"""Architectures of NVIDIA GPUs, and what a dry run saw on one: no numbers, and no verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from attn_export.errors import UsageError

# -- the GPUs that a dry run can claim to have --------------------------------------------------


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


# -- what was seen ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NodeElsewhere:
    """A node that the CUDA provider does not run.

    Attributes:
        name: Its name in the graph.
        operator: Its operator.
        provider: The execution provider that runs it.
        reason: Why, in the provider's words where it has any.
        is_attention: Whether it computes attention or a projection, not only shapes.
    """

    name: str
    operator: str
    provider: str
    reason: str
    is_attention: bool


@dataclasses.dataclass(frozen=True)
class Event:
    """One call to the device in a step.

    Attributes:
        kind: ``"launch"``, ``"library"``, ``"to device"``, ``"to host"``, ``"on device"``,
            ``"fill"`` or ``"wait"``.
        name: The kernel or function, readable.
        bytes: Of a copy; of a launch, those of keys or values that it writes to another place.
        node: The node that made it; empty for inputs and outputs.
    """

    kind: str
    name: str
    bytes: int
    node: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One run of the graph, after another of the same sizes.

    Attributes:
        name: ``"prefill"``, ``"decode"`` or ``"step"``.
        sizes: The size of each axis.
        events: In order.
        attention: The kernels that compute attention, classified.
        cache_copies: The kernels that copy keys and values, with how often.
        waits: The nodes that wait for the device, or copy from it to the host.
        stopped: The error that ended the run; empty if there was none.
        finding: The meaning of `stopped`.
        peak_bytes: The most device memory that was reserved at once while it ran.
    """

    name: str
    sizes: Mapping[str, int]
    events: tuple[Event, ...]
    attention: tuple[str, ...]
    cache_copies: Mapping[str, int]
    waits: tuple[str, ...]
    stopped: str = ""
    finding: str = ""
    peak_bytes: int = 0

    @property
    def launches(self) -> int:
        """The number of kernels launched, library calls included: each launches at least one."""
        return sum(event.kind in ("launch", "library") for event in self.events)

    @property
    def cache_bytes(self) -> int:
        """The bytes of keys and values that kernels repeat or write anew."""
        return sum(event.bytes for event in self.events if event.kind == "launch")

    def copied(self, *, by_nodes: bool) -> int:
        """Return the number of copies between host and device.

        Args:
            by_nodes: Those that nodes ask for; else those of inputs and outputs.
        """
        between = [event for event in self.events if event.kind in ("to device", "to host")]
        return sum(bool(event.node) == by_nodes for event in between)


@dataclasses.dataclass(frozen=True)
class Observation:
    """A graph on one architecture.

    Attributes:
        graph: The file name of the graph.
        architecture: Its name.
        on_cuda: The number of nodes of each operator on CUDA.
        elsewhere: The nodes that CUDA does not run.
        steps: The runs.
        peak_bytes: The most device memory that was reserved at once, from loading on.
        libraries: The libraries of NVIDIA that it needs beside the CUDA runtime.
        refused: The error by which the graph was refused, in the provider's words, or "".
        notes: Limits of what was seen.
    """

    graph: str
    architecture: str
    on_cuda: Mapping[str, int] = dataclasses.field(default_factory=dict)
    elsewhere: tuple[NodeElsewhere, ...] = ()
    steps: tuple[Step, ...] = ()
    peak_bytes: int = 0
    libraries: tuple[str, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """The reason that the graph cannot run on CUDA; "" where none was seen.

        A step that stopped for lack of cuDNN, or for a number that the device computes, is no
        problem: the dry run cannot go on, and a GPU can.
        """
        on_the_cpu = dict.fromkeys(node.operator for node in self.elsewhere if node.is_attention)
        if self.refused or on_the_cpu:
            return self.refused or f"on the CPU: {', '.join(on_the_cpu)}"
        return "".join(
            step.stopped for step in self.steps if "cuDNN" not in step.finding and not step.waits
        )


@dataclasses.dataclass(frozen=True)
class BestGraph:
    """A graph of a bundle that serves an architecture best in one step, by count.

    Attributes:
        architecture: The name of the architecture.
        step: The name of the step.
        graph: The file name of the graph.
        cache_bytes: The bytes of keys and values that it copies in the step.
        launches: The number of kernels that it launches in the step.
    """

    architecture: str
    step: str
    graph: str
    cache_bytes: int
    launches: int


def best_graphs(observations: Sequence[Observation]) -> list[BestGraph]:
    """Return the graphs that serve each architecture best in each step, where several were run.

    They run on CUDA to their end, and no other graph copies as few bytes of keys and values in as
    few launches. Of equals the first is returned; of several, that with the fewest launches comes
    first. A step that waits for a number that a dry run does not have is left out: on a GPU it may
    launch other kernels.

    Args:
        observations: Of the graphs of one bundle.
    """
    if len({one.graph for one in observations}) < 2:
        return []
    found: dict[tuple[str, str], list[BestGraph]] = {}
    for one in observations:
        for step in one.steps:
            if one.problem or step.stopped or step.waits:
                continue
            place = (one.architecture, step.name)
            new = BestGraph(*place, one.graph, step.cache_bytes, step.launches)
            found.setdefault(place, []).append(new)
    return [best for graphs in found.values() for best in _not_beaten(graphs)]


def _not_beaten(graphs: Sequence[BestGraph]) -> list[BestGraph]:
    kept: list[BestGraph] = []
    for graph in sorted(graphs, key=lambda one: (one.launches, one.cache_bytes)):
        if not kept or graph.cache_bytes < kept[-1].cache_bytes:
            kept.append(graph)
    return kept
