"""ONNX Runtime, CUDA execution provider, with proof that attention ran there.

If CUDA is missing or broken, ONNX Runtime raises no error and creates a session on the CPU, even if
only CUDA was requested; `get_available_providers()` and `get_device()` still report CUDA. Therefore
the engine reads the session's own list of the nodes that each provider runs.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.runtimes.engines.ort_cpu import (
    CPU_PROVIDER,
    OrtCpu,
    OrtEngine,
    sdk,
    session_options,
    with_options,
)
from attn_export.runtimes.protocol import Engine, Facts, Options

TF32 = "use_tf32"
CUDA_PROVIDER = "CUDAExecutionProvider"

COMPUTING = frozenset(
    {
        "Attention", "CausalConvWithState", "DynamicQuantizeMatMul", "Gemm", "GroupQueryAttention",
        "LinearAttention", "MatMul", "MatMulInteger", "MatMulIntegerToFloat", "MultiHeadAttention",
        "PackedMultiHeadAttention", "Softmax",
    }
)  # fmt: skip
"""The operators that compute attention or projections, which must run on CUDA. Nodes that compute
shapes may run on the CPU."""


ROUNDED_INPUTS = "com.microsoft.MatMulNBits(accuracy_level 4)"


class OrtCuda(OrtCpu):
    """The runtime `ort-cuda`, without TF32: CUDA's default has 10 bits of precision."""

    name = "ort-cuda"
    about = (
        "ONNX Runtime of the extra `gpu`, CUDA, TF32 off; counts only if the attention nodes ran "
        "on CUDA, by ONNX Runtime's record of their placement"
    )
    packages = ()  # that of ort-cpu, or onnxruntime-gpu
    required = False
    device = "cuda"
    unsupported: Mapping[str, str] = {
        # All limits but the first were measured in dry runs, with the same result on every
        # architecture (docs/results/cuda_limits.md). Dry runs have no cuDNN: with cuDNN, some of
        # these may run. The first is known from matmul_nbits.h in
        # onnxruntime/contrib_ops/cuda/quantization, which does not read the attribute. It cannot
        # be measured: a dry run computes no numbers.
        ROUNDED_INPUTS: "CUDA's kernel does not round inputs of products to 8 bits",
        "com.microsoft.GroupQueryAttention(FLOAT)": (
            "CUDA has no kernel of it for float32; it would run on the CPU"
        ),
        "MatMulInteger": (
            "CUDA has no kernel of it for inputs in uint8; products would run on the CPU"
        ),
        "Attention(qk_matmul_output)": (
            "Only kNone and kQK output modes are supported in unified unfused attention"
        ),
    }
    counter_options: Mapping[str, Options] = {**OrtCpu.counter_options, "TF32 off": {TF32: "0"}}

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return super().unavailable() or no_cuda_device()

    def prepare(self) -> None:
        """Import the SDK, and load the CUDA libraries from the packages of PyTorch or NVIDIA."""
        onnxruntime = sdk()
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:
        return CudaEngine(graph, *cuda_session(threads, options))


RUNTIME = OrtCuda


class CudaEngine(OrtEngine):
    """An ONNX Runtime session that records the execution provider of each node."""

    device = "cuda"

    def facts(self) -> Facts:
        """Return the providers, the use of TF32, and node counts by provider and operator."""
        return super().facts() | {"tf32": self._uses_tf32(), "nodes": self._operators_by_provider()}

    def objection(self) -> str:
        """Return the reason that the run does not count as CUDA, or ""."""
        by_provider = self._operators_by_provider()
        on_cuda = COMPUTING & by_provider.get(CUDA_PROVIDER, {}).keys()
        elsewhere = sorted(
            f"{operator} on {provider}"
            for provider, operators in by_provider.items()
            if provider != CUDA_PROVIDER
            for operator in COMPUTING & operators.keys()
        )
        if elsewhere:
            return f"attention did not run on CUDA: {', '.join(elsewhere)}"
        return "" if on_cuda else "attention did not run on CUDA: no node of it was placed there"

    def _uses_tf32(self) -> bool:
        cuda_options = self.session.get_provider_options().get(CUDA_PROVIDER, {})
        return bool(cuda_options.get(TF32) != "0")

    def _operators_by_provider(self) -> dict[str, dict[str, int]]:
        operators: dict[str, list[str]] = {}
        for subgraph in self.session.get_provider_graph_assignment_info():
            names = [node.op_type for node in subgraph.get_nodes()]
            operators.setdefault(subgraph.ep_name, []).extend(names)
        return {provider: dict(Counter(names)) for provider, names in operators.items()}


def cuda_session(threads: int, options: Options) -> tuple[Any, list[Any]]:
    """Return the session options and the execution providers of a session on CUDA."""
    others = {name: value for name, value in options.items() if name != TF32}
    session = with_options(session_options(threads), others)
    session.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return session, [(CUDA_PROVIDER, {TF32: options.get(TF32, "0")}), CPU_PROVIDER]


def no_cuda_device() -> str:
    """Ask the driver for CUDA devices; return the reason that there is none, or ""."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        if hasattr(driver, "stand_in_driver"):
            return f"{library} is the stand-in of dry runs; take it from LD_LIBRARY_PATH"
        count = ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            return "the NVIDIA driver reports no usable GPU"
        return ""
    return "no NVIDIA driver (libcuda was not found)"
