"""tract, an engine in Rust, through its Python package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.runtimes.protocol import Engine, PackagedRuntime

if TYPE_CHECKING:
    import numpy as np


class _Tract(PackagedRuntime):
    """The runtime `tract`."""

    name = "tract"
    about = "tract, an engine in Rust, CPU"
    packages = ("tract",)
    required = True
    modules = ("tract", "onnx")
    dialects = frozenset({STANDARD, PORTABLE})
    measured = "0.23.9"
    unsupported: Mapping[str, str] = {
        "Attention(mask: BOOL)": "FlashSDPA: Mask must be floating point",
        "Attention(given mask: FLOAT)": "NaN in rows of which all keys are masked",
        "Attention(is_causal) with Attention(mask: FLOAT)": (
            "SDPA: Mask cannot be provided if is_causal=true"
        ),
        "Attention(nonpad_kv_seqlen)": "nonpad_kv_seqlen input is not supported",
        "Attention(qk_matmul_output)": "qk_matmul_output_mode is not supported",
        "Attention(softcap)": "softcap is not supported",
        "LinearAttention": "Unimplemented(LinearAttention)",
        "Softplus": "the gates of linear attention are not exact enough",
        "LessOrEqual(of one Range)": "Undetermined symbol in expression, or it aborts",
        "Range(total_len)": (
            "Impossible to unify Sym(total_len) with Add([Sym(query_len), Sym(past_len)])"
        ),
        "DequantizeLinear(INT4)": "Unknown DatumType Int4",
        "DequantizeLinear(UINT4)": "Unknown DatumType Uint4",
        "Trilu": "Impossible to unify TDim with I64",
        "input BFLOAT16": "Unknown DatumType Bfloat16",
    }

    def prepare(self) -> None:
        """Import the SDK."""
        # If RUST_BACKTRACE is set, errors contain a stack trace, which takes longer than a run.
        os.environ["RUST_LIB_BACKTRACE"] = "0"
        super().prepare()

    def engine(self, graph: Path, threads: int) -> Engine:  # noqa: ARG002 (it computes in one)
        """Return a typed and optimised graph."""
        import onnx
        import tract

        # tract names an output after its node.
        proto = onnx.load(graph, load_external_data=False).graph
        outputs = [value.name for value in proto.output]
        model = tract.onnx().load(str(graph))
        names = [model.input_name(i) for i in range(model.input_count())]
        runnable = model.into_model().into_runnable()

        def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            arrays = (output.to_numpy() for output in runnable.run([inputs[n] for n in names]))
            return dict(zip(outputs, arrays, strict=True))

        return Engine(run, {"device": "CPU", "precision": "as the graph says", "threads": 1})


RUNTIME = _Tract
