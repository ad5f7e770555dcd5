"""A dry run of one graph, by the CUDA provider over the stand-in libraries, in this process.

Only `dry_run.py` starts it, in a child process with limits that does nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import GraphError, one_line, printable
from attn_export.parts.cuda_dry_run.dry_run_inputs import (
    StepSizes,
    caches_in_place,
    inputs_of,
    lengths_in,
    steps_of,
    unknown_axes,
)
from attn_export.parts.cuda_dry_run.dry_run_results import (
    Event,
    NodeElsewhere,
    Observation,
    Step,
    architectures_named,
)
from attn_export.parts.cuda_dry_run.dry_run_timeline import (
    copies_of_cache,
    events_of_step,
    kinds_of_attention,
    peak_bytes,
    read_record,
)
from attn_export.parts.cuda_dry_run.install_cuda_stand_in import CUDA_STAND_IN, LIBRARIES
from attn_export.parts.installing import home
from attn_export.runtimes.engines.ort_cuda import COMPUTING, CUDA_PROVIDER, CudaEngine, cuda_session
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.parts.cuda_dry_run.dry_run_results import Architecture

_OF_NVIDIA = re.compile(r"lib(cuda|cudart|cudnn|cublas|cublasLt|curand|nvidia)\b.*\.so")
"""A regular expression for the file names of NVIDIA's libraries."""

INFO = 1
"""The severity of ONNX Runtime's messages about nodes without a CUDA kernel."""


def observe(
    graph: str,
    architecture: str,
    bound: Mapping[str, str],
    roles: Mapping[str, str],
    batch: int,
    query_len: int | None,
    past_len: int | None,
) -> dict[str, Any]:
    """Run a graph on the stand-in libraries.

    `bound`: Names of outputs that share the buffer of an input, with that input. If empty, they are
    those of `caches_in_place`.

    Returns:
        An `Observation` as plain values.
    """
    from attn_export.graph.load import load_proto, refuse_bad_data

    path = Path(graph)
    model = load_proto(path)
    refuse_bad_data(model, path)
    (card,) = architectures_named([architecture])
    with scratch() as folder:
        record = folder / "record"
        library = load_stand_in(card, record)
        buffers, lengths = bound or caches_in_place(model), lengths_in(model)
        run = _DryRun(path, folder, record, buffers, lengths, roles)
        sizes = (batch, query_len, past_len)
        observation = run.observe(card, sizes)
        notes = (*observation.notes, *_code_notes(library, card))
        observation = dataclasses.replace(observation, notes=notes)
    _refuse_other_libraries()
    return dataclasses.asdict(observation)


def load_stand_in(card: Architecture, record: Path) -> ctypes.CDLL:
    """Load the stand-in libraries, so that ONNX Runtime finds them under NVIDIA's names.

    Returns:
        The library that holds the record and its settings.
    """
    folder = home() / CUDA_STAND_IN
    first, *_ = [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    first.stand_in_configure(
        card.capability, card.multiprocessors, card.shared_per_block,
        card.shared_per_multiprocessor, ctypes.c_size_t(card.memory << 30), os.fsencode(record),
    )  # fmt: skip
    return first


@dataclasses.dataclass(frozen=True)
class _DryRun:
    """A graph with the files of a dry run, its bound outputs, lengths and roles of axes."""

    graph: Path
    folder: Path
    record: Path
    bound: Mapping[str, str]
    lengths: Mapping[str, int]
    roles: Mapping[str, str]

    def observe(self, card: Architecture, sizes: tuple[int, int | None, int | None]) -> Observation:
        """Load the graph, run its steps, and return the observations."""
        options, providers = cuda_session(1, {})
        options.enable_profiling = True
        options.profile_file_prefix = str(self.folder / "profile")
        options.log_severity_level = INFO
        with _captured_stderr(self.folder / "log") as log:
            try:
                engine = CudaEngine(self.graph, options, providers)
            except Exception as error:
                return Observation(self.graph.name, card.name, refused=one_line(error))
            subgraphs = engine.session.get_provider_graph_assignment_info()
            ends = engine.session.get_inputs()
            shapes = [[self.roles.get(axis, axis) for axis in end.shape] for end in ends]
            step_sizes = steps_of(shapes, *sizes)
            steps = self._run_steps(engine, ends, step_sizes)
        on_cuda, elsewhere = _split_by_provider(subgraphs, _reasons_in(log()))
        return Observation(
            self.graph.name, card.name, on_cuda, elsewhere, steps,
            peak_bytes(read_record(self.record)), _libraries(steps),
            notes=unknown_axes(shapes),
        )  # fmt: skip

    def _run_steps(
        self, engine: CudaEngine, ends: Sequence[Any], step_sizes: Sequence[StepSizes]
    ) -> tuple[Step, ...]:
        """Run each step twice, and return the second runs with their events."""
        runs = []
        for sizes in step_sizes:
            inputs = inputs_of(ends, sizes, self.lengths, self.roles)
            start, stopped = 0, ""
            for _ in range(2):
                start = self.record.stat().st_size
                try:
                    engine.run(inputs, self.bound)
                except Exception as error:
                    # The text after it is about the file that replaces cuDNN.
                    stopped = printable(str(error).partition(": dlopen failed")[0])
                    break
            runs.append((sizes, start, self.record.stat().st_size, stopped))
        started = engine.session.get_profiling_start_time_ns()
        profile = json.loads(Path(engine.session.end_profiling()).read_text(encoding="utf-8"))
        steps = []
        for sizes, start, end, stopped in runs:
            recorded = read_record(self.record, start, end)
            peak = peak_bytes(recorded, read_record(self.record, 0, start))
            steps.append(_step(sizes, events_of_step(recorded, profile, started), stopped, peak))
        return tuple(steps)


def _step(sizes: StepSizes, events: tuple[Event, ...], stopped: str, peak: int) -> Step:
    kernels = [event.name for event in events if event.kind == "launch"]
    waits = [event.node for event in events if event.kind in ("wait", "to host") and event.node]
    axes = {"batch": sizes.batch, "query_len": sizes.query_len, "past_len": sizes.past_len}
    return Step(
        sizes.name, axes, events, kinds_of_attention(kernels), copies_of_cache(kernels),
        tuple(dict.fromkeys(waits)), stopped, _finding(stopped, waits), peak,
    )  # fmt: skip


def _finding(stopped: str, waits: Sequence[str]) -> str:
    """Explain the error that stopped a run, in a sentence; return "" if there was none."""
    if not stopped:
        return ""
    if "cuDNN is unavailable" in stopped:
        return "this kernel is cuDNN's: cuDNN must be installed"
    if waits:
        return (
            f"{waits[-1]} hands the host a number that the device computes and a dry run does not "
            "have, so a GPU may go on here; each step waits there for the device"
        )
    return "the provider refuses these inputs"


def _libraries(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the NVIDIA libraries whose functions were called, or that a step lacked."""
    called = [event.name for step in steps for event in step.events if event.kind == "library"]
    libraries = {"cuBLASLt" if name.startswith("cublasLt") else "cuBLAS" for name in called}
    if any("cuDNN is unavailable" in step.stopped for step in steps):
        libraries.add("cuDNN")
    return tuple(sorted(libraries))


def _code_notes(library: ctypes.CDLL, card: Architecture) -> tuple[str, ...]:
    """Return a note if the provider, which has run, has no code for the architecture."""
    major = card.capability // 10 * 10
    fits = any(library.stand_in_has_code(sm) & 1 for sm in range(major, card.capability + 1))
    from_ptx = any(library.stand_in_has_code(sm) & 2 for sm in range(card.capability + 1))
    if fits or from_ptx:
        return ()
    return (
        f"this onnxruntime has no machine code and no PTX for {card.name}: its kernels do not "
        "start there",
    )


def _refuse_other_libraries() -> None:
    """Raise GraphError if this process has loaded a real library of NVIDIA."""
    ours = os.path.realpath(home() / CUDA_STAND_IN)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        library = "/" + line.partition("/")[2]
        if _OF_NVIDIA.match(Path(library).name) and not library.startswith(ours + "/"):
            raise GraphError(
                f"not a dry run: the process loaded {printable(library, 120)}, which is no "
                "stand-in; remove it from LD_PRELOAD"
            )


# -- nodes that the provider does not run, with reasons -----------------------------------------

_NO_KERNEL = re.compile(r"CUDA kernel not found in registries for Op type: (\S+) node name: (\S*)")
_FORCED = re.compile(r"Force fallback to CPU execution for node: (\S+) because")

SHAPES = "it computes shapes, which ONNX Runtime keeps on the host"
_NONE_FITS = "the CUDA provider has no kernel of this operator for its types and opset"
UNSAID = "ONNX Runtime gives no reason"
_MOST_LOG = 16 << 20


@contextlib.contextmanager
def _captured_stderr(path: Path) -> Iterator[Callable[[], str]]:
    """Redirect this process's stderr to a file; yield a function that reads what it has so far."""
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: path.read_bytes()[:_MOST_LOG].decode(errors="replace")
        finally:
            os.dup2(before, 2)
            os.close(before)


def _reasons_in(log: str) -> dict[str, str]:
    """Return the reason that CUDA does not run a node, for each node that the log names."""
    reasons = dict.fromkeys(_FORCED.findall(log), SHAPES)
    return reasons | {name: _NONE_FITS for _, name in _NO_KERNEL.findall(log)}


def _split_by_provider(
    subgraphs: Sequence[Any], reasons: Mapping[str, str]
) -> tuple[dict[str, int], tuple[NodeElsewhere, ...]]:
    """Return the number of nodes of each operator on CUDA, and the nodes elsewhere."""
    on_cuda: dict[str, int] = {}
    elsewhere = []
    for subgraph in subgraphs:
        for node in subgraph.get_nodes():
            if subgraph.ep_name == CUDA_PROVIDER:
                on_cuda[node.op_type] = on_cuda.get(node.op_type, 0) + 1
                continue
            elsewhere.append(
                NodeElsewhere(
                    printable(node.name, 120), printable(node.op_type, 60), subgraph.ep_name,
                    reasons.get(node.name, UNSAID), node.op_type in COMPUTING,
                )
            )  # fmt: skip
    return on_cuda, tuple(elsewhere)
