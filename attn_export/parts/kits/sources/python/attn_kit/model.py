"""Attention in ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

# Otherwise ONNX Runtime collects usage events in the home folder and sends them to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

from attn_kit.eight_bit_sums import entries_for
from attn_kit.files import check_regular
from attn_kit.settings import AXES, BOUND, DECODE, FILES, GRAPH

HERE = Path(__file__).resolve().parent


def bundle_folder() -> Path:
    """Return the bundle's folder: inside the installed package, or beside it in the project."""
    installed = HERE / "bundle"
    return installed if installed.is_dir() else HERE.parent / "bundle"


class Model:
    """Loaded graphs: one for any number of tokens and, if the bundle has it, one for single tokens.

    Args:
        path: A graph to use instead of the kit's graphs.
        threads: Threads for computing; 0 for the default of ONNX Runtime.
        providers: Execution providers, the preferred one first.
    """

    def __init__(
        self,
        path: Path | None = None,
        threads: int = 0,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        # Otherwise a product with dequantised weights rounds its inputs to 8 bits.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        graph = path or bundle_folder() / GRAPH
        for file in (graph, *(graph.parent / name for name in FILES if path is None)):
            check_regular(file)
        for entry in entries_for(graph).items():
            options.add_session_config_entry(*entry)
        self._session = ort.InferenceSession(str(graph), options, providers=list(providers))
        self._single = self._session
        if path is None and DECODE != GRAPH:
            single = str(bundle_folder() / DECODE)
            self._single = ort.InferenceSession(single, options, providers=list(providers))
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def run(
        self, inputs: Mapping[str, np.ndarray], *, in_place: bool = False
    ) -> dict[str, np.ndarray]:
        """Run a graph once and return its outputs by name.

        Args:
            inputs: The inputs by name, with the axes of the cache in the order of the graph: see
                `cache_layout`.
            in_place: Whether `present_*` may be written into the arrays of `past_*`, which must be
                contiguous. This saves a copy of the cache at every step.
        """
        # The graph for single tokens may require that outputs in BOUND are written in place.
        may_be_single = in_place or not BOUND
        session = self._single if may_be_single and _is_one_token(inputs) else self._session
        if not (in_place and BOUND):
            outputs = session.run(self.outputs, dict(inputs))
            return dict(zip(self.outputs, outputs, strict=True))
        # On the CPU an OrtValue shares the memory of its array.
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            if name in BOUND:
                binding.bind_ortvalue_output(name, values[BOUND[name]])
            else:
                binding.bind_output(name)
        session.run_with_iobinding(binding)
        results = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        return {
            name: inputs[BOUND[name]] if name in BOUND else value.numpy().copy()
            for name, value in results.items()
        }


def _is_one_token(inputs: Mapping[str, np.ndarray]) -> bool:
    return any(
        axis == "query_len" and array.shape[at] == 1
        for name, array in inputs.items()
        for at, axis in enumerate(AXES.get(name, ()))
    )
