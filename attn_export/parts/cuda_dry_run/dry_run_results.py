"""GPU architectures for dry runs, and the observations of a dry run, which has no verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from attn_export.errors import UsageError, choose

# -- the GPUs that a dry run can claim to have --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The properties of a GPU by which ONNX Runtime chooses kernels.

    Attributes:
        shared_per_block: The largest shared memory of a block, in bytes.
        shared_per_multiprocessor: The shared memory of a multiprocessor, in bytes.
        memory: The memory of this GPU, in GiB.
    """

    name: str
    card: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    memory: int

    @property
    def capability(self) -> int:
        """The compute capability times ten: 80 for 8.0."""
        return int(self.name.removeprefix("sm_"))


_KIB = 1024
ARCHITECTURES = (
    Architecture("sm_75", "T4", 40, 64 * _KIB, 64 * _KIB, 16),
    Architecture("sm_80", "A100", 108, 163 * _KIB, 164 * _KIB, 80),
    Architecture("sm_86", "A10", 72, 99 * _KIB, 100 * _KIB, 24),
    Architecture("sm_89", "L4", 58, 99 * _KIB, 100 * _KIB, 24),
    Architecture("sm_90", "H100", 132, 227 * _KIB, 228 * _KIB, 80),
    Architecture("sm_100", "B200", 148, 227 * _KIB, 228 * _KIB, 180),
)
"""The known architectures. The figures are those of the CUDA C++ Programming Guide, section
"Compute Capabilities", and of data sheets."""

DEFAULT = ("sm_80", "sm_90")
ALL = "all"


def architectures_named(names: Iterable[str]) -> tuple[Architecture, ...]:
    """Return the architectures of these names, each once; those of `DEFAULT` for no names."""
    known = {architecture.name: architecture for architecture in ARCHITECTURES}
    selected = tuple(dict.fromkeys(names)) or DEFAULT
    if ALL in selected:
        return ARCHITECTURES
    for name in selected:
        if name not in known:
            raise UsageError(f"unknown architecture {name!r}; {choose(name, (*known, ALL))}")
    return tuple(known[name] for name in selected)


# -- observations -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NodeElsewhere:
    """A node that the CUDA provider does not run.

    Attributes:
        is_attention: Whether the node computes attention or a projection, and not only shapes.
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
        bytes: The bytes of a copy. For a launch: the bytes of keys and values that the kernel
            copies.
    """

    kind: str
    name: str
    bytes: int
    node: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One run of the graph, after a first run with the same sizes.

    Attributes:
        waits: The nodes that wait for the device, or copy from the device to the host.
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
        """The bytes of keys and values that kernels repeat or copy."""
        return sum(event.bytes for event in self.events if event.kind == "launch")

    @property
    def copied(self) -> int:
        """The number of copies between host and device that nodes make."""
        between = (event for event in self.events if event.kind in ("to device", "to host"))
        return sum(bool(event.node) for event in between)


@dataclasses.dataclass(frozen=True)
class Observation:
    """The observations of a dry run of one graph on one architecture.

    Attributes:
        libraries: The NVIDIA libraries that the graph needs besides the CUDA runtime.
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
        """The reason that the graph cannot run on CUDA, or "".

        A step that needs cuDNN, or a number that the device computes, stops the dry run. That is
        no problem of the graph: a GPU can run it.
        """
        on_the_cpu = dict.fromkeys(node.operator for node in self.elsewhere if node.is_attention)
        if self.refused or on_the_cpu:
            return self.refused or f"on the CPU: {', '.join(on_the_cpu)}"
        stopped = (
            step.stopped for step in self.steps if "cuDNN" not in step.finding and not step.waits
        )
        return next(filter(None, stopped), "")


@dataclasses.dataclass(frozen=True)
class _BestGraph:
    """A graph of a bundle that is best for one architecture and step by its figures."""

    architecture: str
    step: str
    graph: str
    cache_bytes: int
    launches: int


def best_graphs(observations: Sequence[Observation]) -> list[_BestGraph]:
    """Return the best graphs for each architecture and step, if several graphs were run.

    A graph is best if no other is as good in both figures and better in one: the bytes of keys and
    values that it copies, and the number of launches. Of graphs with equal figures the first is
    returned. The result is sorted by launches. Graphs that do not run on CUDA to the end are left
    out, and so are steps that wait for a number which a dry run does not have: on a GPU they may
    launch other kernels.
    """
    if len({observation.graph for observation in observations}) < 2:
        return []
    candidates: dict[tuple[str, str], list[_BestGraph]] = {}
    for observation in observations:
        for step in observation.steps:
            if observation.problem or step.stopped or step.waits:
                continue
            key = (observation.architecture, step.name)
            candidate = _BestGraph(*key, observation.graph, step.cache_bytes, step.launches)
            candidates.setdefault(key, []).append(candidate)
    return [best for graphs in candidates.values() for best in _pareto_front(graphs)]


def _pareto_front(graphs: Sequence[_BestGraph]) -> list[_BestGraph]:
    best: list[_BestGraph] = []
    for graph in sorted(graphs, key=lambda graph: (graph.launches, graph.cache_bytes)):
        if not best or graph.cache_bytes < best[-1].cache_bytes:
            best.append(graph)
    return best
