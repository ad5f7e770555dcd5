"""Layers on a GPU: sessions with everything bound, PyTorch beside them, kernels and times."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attn_export.bench.peers_spec import layer
from attn_export.results import GraphFile
from attn_export.runtimes.dry_run_inputs import Sizes, inputs_of
from attn_export.runtimes.dry_run_timeline import read_record, readable
from attn_export.runtimes.ort_cpu import value_on
from attn_export.runtimes.ort_cuda import PROVIDER, TF32
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import is_floating, numpy_dtype

OF_LIBRARIES = re.compile(
    r"Mem(cpy|set)|gemm|gemv|nvjet|split[kK]|cublas|xmma|^Kernel2?$|dot_kernel|reduce_1Block"
)
"""Names of copies, and of kernels that cuBLAS launches; templates are left out of them."""

Run = Callable[[], object]


class BoundLayer:
    """A graph in the CUDA provider, with all inputs and outputs in buffers of the device.

    Args:
        folder: The folder of the graph.
        graph: The description of the graph: outputs that lie in the buffer of an input.
        sizes: B, L and P.
        captured: Whether ONNX Runtime records its first run as a CUDA graph, and replays it.
    """

    def __init__(
        self, folder: Path, graph: GraphFile, sizes: tuple[int, int, int], *, captured: bool = False
    ) -> None:
        import onnxruntime as ort

        options = {TF32: "0", "enable_cuda_graph": str(int(captured))}
        providers = [(PROVIDER, options), "CPUExecutionProvider"]
        self.session = ort.InferenceSession(str(folder / graph.name), providers=providers)
        self.binding = self.session.io_binding()
        step = Sizes("step", *sizes)
        arrays = inputs_of(self.session.get_inputs(), step, {})
        random = np.random.default_rng(0)
        held = {}
        for name, array in arrays.items():
            if is_floating(array.dtype):
                array = random.standard_normal(array.shape, np.float32).astype(array.dtype)
            held[name] = value_on(array, "cuda")
            self.binding.bind_ortvalue_input(name, held[name])
        for end in self.session.get_outputs():
            if end.name in graph.bound:
                buffer = held[graph.bound[end.name]]
            else:
                shape = [n if isinstance(n, int) else step.of_axis(n) for n in end.shape]
                dtype = numpy_dtype(end.type.removeprefix("tensor(").removesuffix(")"))
                buffer = value_on(np.zeros(shape, dtype), "cuda")
            self.binding.bind_ortvalue_output(end.name, buffer)
        self.buffers = held

    def run(self) -> None:
        """Run once, and wait for the outputs."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()


def torch_layer(spec: AttentionSpec, sizes: tuple[int, int, int], device: str) -> Run:
    """Return a run of the layer in PyTorch: scaled_dot_product_attention, with a static cache.

    Args:
        spec: The spec. A prefill, which has no past, runs without a cache.
        sizes: B, L and P.
        device: The device.
    """
    batch, query_len, past_len = sizes
    total = past_len + query_len
    axes = {"batch": batch, "query_len": query_len, "past_len": past_len, "total_len": total}
    plain = dataclasses.replace(spec, cache="append" if past_len else "none")
    module, inputs = layer(
        plain, {**axes, "key_len": total, "capacity": total}, static=past_len > 0, device=device
    )

    def run() -> None:
        with torch.inference_mode():
            module(**inputs)

    return run


def waited(run: Run) -> Run:
    """Return a run that ends when the GPU is done."""

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize()

    return run_and_wait


def captured_by_torch(run: Run) -> Run:
    """Return the replay of a run that PyTorch records as a CUDA graph; it does not wait."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Run = graph.replay
    return replay


def kernels_by_profiler(run: Run) -> list[str]:
    """Return the kernels that a run launches on a GPU, without those of cuBLAS, in order.

    PyTorch's profiler sees the kernels of the whole process.
    """
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [each for each in seen.events() or () if str(each.device_type).endswith("CUDA")]
    names = [readable(each.name) for each in sorted(events, key=lambda one: one.time_range.start)]
    return [name for name in names if not OF_LIBRARIES.search(name)]


def kernels_by_record(record: Path) -> Callable[[Run], list[str]]:
    """Return a function that gives the kernels of a run over the stand-in libraries.

    Args:
        record: The file that the libraries write to.
    """

    def kernels(run: Run) -> list[str]:
        run()
        start = record.stat().st_size
        run()
        return [readable(e.name) for e in read_record(record, start) if e.kind == "launch"]

    return kernels


def times(contestants: Mapping[str, Run], rounds: int, runs: int) -> dict[str, float]:
    """Return the median time of each contestant in ms, of interleaved rounds.

    Args:
        contestants: The runs by name; each ends when the device is done.
        rounds: The number of rounds.
        runs: The number of runs of a contestant in a round, after two that warm up.
    """
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            for number in range(runs + 2):
                started = time.perf_counter()
                run()
                if number >= 2:
                    measured[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values) for name, values in measured.items()}


def best_of(found: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return the smallest time of those contestants that there are."""
    return min((found[name] for name in names if name in found), default=None)


def described(error: Exception) -> dict[str, Any]:
    """Return an error as an entry of the results."""
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
