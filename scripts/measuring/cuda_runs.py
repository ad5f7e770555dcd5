"""Runs of layers on a GPU, in ONNX Runtime and in PyTorch, with their kernels and times."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attn_export.parts.benchmarks.torch_layers import layer
from attn_export.parts.cuda_dry_run.dry_run_inputs import StepSizes, inputs_of
from attn_export.parts.cuda_dry_run.dry_run_timeline import read_record, readable
from attn_export.runtimes.engines.ort_cpu import CPU_PROVIDER, dtype_name, sdk, value_on
from attn_export.runtimes.engines.ort_cuda import CUDA_PROVIDER, TF32
from attn_export.schema import GraphFile
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import is_floating, numpy_dtype
from measuring.timing import interleaved

OF_LIBRARIES = re.compile(
    r"Mem(cpy|set)|gemm|gemv|nvjet|split[kK](?!v)|cublas|xmma|^Kernel2?$|dot_kernel|reduce_1Block"
)
"""Names of copies and of kernels that cuBLAS launches, without template arguments."""

CUDNN_ATTENTION = "ORT_ENABLE_CUDNN_FLASH_ATTENTION"
"""The variable without which ONNX Runtime prefers cuDNN's attention from sm_90 on, if it is there.
Dry runs have no cuDNN."""

Run = Callable[[], object]


class BoundLayer:
    """A graph in the CUDA provider, with all inputs and outputs bound to buffers on the device.

    Args:
        folder: The folder of the graph.
        graph: The graph's file name, and its outputs that share the buffer of an input.
        sizes: B, L and P.
        captured: Whether ONNX Runtime records the first run as a CUDA graph and replays it later.
    """

    def __init__(
        self, folder: Path, graph: GraphFile, sizes: tuple[int, int, int], *, captured: bool = False
    ) -> None:
        options = {TF32: "0", "enable_cuda_graph": str(int(captured))}
        providers = [(CUDA_PROVIDER, options), CPU_PROVIDER]
        self.session = sdk().InferenceSession(str(folder / graph.name), providers=providers)
        self.binding = self.session.io_binding()
        step = StepSizes("step", *sizes)
        arrays = inputs_of(self.session.get_inputs(), step, {})
        random = np.random.default_rng(0)
        buffers = {}
        for name, array in arrays.items():
            if is_floating(array.dtype):
                array = random.standard_normal(array.shape, np.float32).astype(array.dtype)
            buffers[name] = value_on(array, "cuda")
            self.binding.bind_ortvalue_input(name, buffers[name])
        for arg in self.session.get_outputs():
            if arg.name in graph.bound:
                buffer = buffers[graph.bound[arg.name]]
            else:
                shape = [n if isinstance(n, int) else step.of_axis(n) for n in arg.shape]
                dtype = numpy_dtype(dtype_name(arg.type))
                buffer = value_on(np.zeros(shape, dtype), "cuda")
            self.binding.bind_ortvalue_output(arg.name, buffer)
        self.buffers = buffers

    def run(self) -> None:
        """Run once, and wait until the outputs are complete."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()


def torch_layer(spec: AttentionSpec, sizes: tuple[int, int, int], device: str) -> Run:
    """Return a function that runs the layer in PyTorch, by SDPA with a static cache.

    Args:
        spec: The spec of the layer.
        sizes: B, L and P. With P 0, the layer has no cache.
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
    """Return a function that calls `run` and waits until the GPU has finished."""

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize()

    return run_and_wait


def captured_by_torch(run: Run) -> Run:
    """Record a run as a CUDA graph of PyTorch; return its replay, which does not wait."""
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
    """Return the kernels and copies of a run on a GPU, in order.

    PyTorch's profiler sees the kernels of the whole process.
    """
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [readable(event.name) for event in events]


def own(names: Iterable[str]) -> list[str]:
    """Return the kernels of ONNX Runtime: without copies, and without those of cuBLAS."""
    return [name for name in names if not OF_LIBRARIES.search(name)]


def kernels_by_record(record: Path) -> Callable[[Run], list[str]]:
    """Return a function that returns launches and calls of libraries over stand-in libraries.

    Args:
        record: The file to which the libraries write calls.
    """

    def kernels(run: Run) -> list[str]:
        run()
        start = record.stat().st_size
        run()
        events = read_record(record, start)
        return [readable(e.name) for e in events if e.kind in ("launch", "library")]

    return kernels


def times(candidates: Mapping[str, Run], rounds: int, runs: int) -> dict[str, float]:
    """Return the median time of each candidate in ms, over interleaved rounds.

    Args:
        candidates: The runs by name, each of which must wait for the device.
        rounds: The number of rounds.
        runs: The number of runs of a candidate in a round, after two that are not counted.
    """
    seconds = interleaved(candidates, rounds, runs=runs, unused=2)
    return {name: statistics.median(values) * 1000 for name, values in seconds.items()}


def best_of(medians: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return the smallest time of the named candidates, or None if none was measured."""
    return min((medians[name] for name in names if name in medians), default=None)


def described(error: Exception) -> dict[str, Any]:
    """Return the entry of the results for an error."""
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
