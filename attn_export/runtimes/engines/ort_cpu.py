"""ONNX Runtime, CPU execution provider."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import DIALECTS, LINEAR_OPSET, ORT_OF_LINEAR
from attn_export.runtimes.protocol import (
    Engine,
    Facts,
    Options,
    Runtime,
    installed_version,
    size_beside,
)
from attn_export.system_info import install_command, missing_package

if TYPE_CHECKING:
    import numpy as np


_OPTIMIZATION = "graph_optimization_level"
_FOLDER_OF_DATA = "session.model_external_initializers_file_folder_path"
CPU_PROVIDER = "CPUExecutionProvider"
_ERRORS_ONLY = 3
_DISTRIBUTIONS = frozenset(
    f"onnxruntime{suffix}" for suffix in ("", "_gpu", "_directml", "_openvino", "_qnn", "_migraphx")
)
"""The distributions that install the module `onnxruntime`, as in the names of `.dist-info`
folders."""

PREPACK_UP_TO = 2**28
"""The size in bytes of a graph's folder above which sessions share the mapped file of weights. They
neither copy weights into the layout that kernels read fastest, nor transpose them in advance, which
takes as much memory again for each session."""

NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")
BFLOAT16, ONNX_BFLOAT16 = "tensor(bfloat16)", 16
_NO_BFLOAT16 = (
    "it has no kernel of this operator in bfloat16; of the graph, only the placement on CUDA in a "
    "dry run is known"
)


class OrtCpu(Runtime):
    """The runtime `ort-cpu`."""

    name = "ort-cpu"
    about = "ONNX Runtime 1.28 or newer, CPU: by default, and then it must run"
    packages: Sequence[str] = ("onnxruntime",)
    required = True
    keeps_non_finite = True
    device = "cpu"
    dialects = frozenset(DIALECTS)
    measured = "1.31.1"
    unsupported: Mapping[str, str] = {
        f"opset {LINEAR_OPSET}": f"its newest opset is 26; {ORT_OF_LINEAR} loads it",
        "com.microsoft.GroupQueryAttention(q_norm_weight)": (
            "it has norms within this operator on CUDA and WebGPU only; of the graph, only "
            "the placement in a dry run is known"
        ),
        "Attention(BFLOAT16)": _NO_BFLOAT16,
        "com.microsoft.GroupQueryAttention(BFLOAT16)": _NO_BFLOAT16,
    }
    later: Mapping[str, str] = {f"opset {LINEAR_OPSET}": ORT_OF_LINEAR}
    counter_options: Mapping[str, Options] = {
        "graph optimisations off": {_OPTIMIZATION: "disable_all"}
    }

    def version(self) -> str | None:
        """Return the version of onnxruntime or onnxruntime-gpu."""
        return installed_version("onnxruntime-gpu", "onnxruntime")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        # `version()` is not used: reading metadata takes as long as creating a session.
        spec = find_spec("onnxruntime")
        if spec is None or spec.origin is None:
            return missing_package("onnxruntime")
        return _conflict(Path(spec.origin).parents[1])

    def prepare(self) -> None:
        """Import the SDK."""
        sdk()

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:
        size = size_beside(graph)
        if size > PREPACK_UP_TO:  # of these, integers need the layout of their kernels
            from attn_export.graph.load import load_proto
            from attn_export.runtimes.sliced_graph import NARROW_INTEGERS, weights_in

            size -= weights_in(load_proto(graph), NARROW_INTEGERS)
        settings = with_options(session_options(threads, graph), options)
        return _loaded(graph, settings, size, PREPACK_UP_TO)

    def load_in_slices(self, graph: Path, threads: int, most: int) -> Engine | None:
        """Load a graph of which one slice is in memory at a time."""
        if self.device != "cpu":
            return None
        from attn_export.runtimes.sliced_graph import SlicedEngine

        def load(model: bytes, size: int) -> Engine:
            settings = session_options(threads, graph)
            settings.add_session_config_entry(_FOLDER_OF_DATA, str(graph.parent.absolute()))
            return _loaded(model, settings, size, most)

        return SlicedEngine(graph, most, load, {"providers": [CPU_PROVIDER]})


RUNTIME = OrtCpu


def _loaded(graph: Path | bytes, settings: Any, size: int, most: int) -> OrtEngine:
    """Return a session, without copies of weights if they take more than `most` bytes."""
    left_out = list[str]()
    if size > most:
        settings.add_session_config_entry("session.disable_prepacking", "1")
        left_out = ["ConstantFolding"]
    return OrtEngine(graph, settings, [CPU_PROVIDER], left_out)


def _conflict(site: Path) -> str:
    """Return the remedy if several distributions installed the module `onnxruntime`, or ""."""
    installed = {path.name.partition("-")[0] for path in site.glob("onnxruntime*-*.dist-info")}
    several = sorted(name.replace("_", "-") for name in installed & _DISTRIBUTIONS)
    if len(several) < 2:
        return ""
    names = " and ".join(several)
    return (
        f"{names} are installed and overwrite each other's files; remove them "
        f"(pip uninstall {' '.join(several)}), then {install_command('.[gpu]')}, "
        "or .[cpu]"
    )


class OrtEngine(Engine):
    """An ONNX Runtime session.

    `graph`: Its file, or the bytes of the model.
    `left_out`: The optimisations that are not made.
    """

    device = "cpu"

    def __init__(
        self, graph: Path | bytes, options: Any, providers: list[Any], left_out: Sequence[str] = ()
    ) -> None:
        self.session = sdk().InferenceSession(
            graph, options, providers=providers, disabled_optimizers=left_out or None
        )
        self._names = [output.name for output in self.session.get_outputs()]
        ends = (*self.session.get_inputs(), *self.session.get_outputs())
        self._types = [end.type for end in ends]

    def run(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Return the outputs of one run, by name."""
        if bound:
            return self._run_in_place(inputs, bound)
        if BFLOAT16 in self._types:
            return self._run_with_bfloat16(inputs)
        outputs = self.session.run(self._names, dict(inputs))
        return dict(zip(self._names, outputs, strict=True))

    def _run_with_bfloat16(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once with `OrtValue` inputs and outputs: the numpy interface has no bfloat16."""
        values = {name: value_on(array) for name, array in inputs.items()}
        outputs = self.session.run_with_ort_values(self._names, values)
        return {name: array_of(out) for name, out in zip(self._names, outputs, strict=True)}

    def _run_in_place(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Run once with some outputs in the buffers of inputs, as in a decoding loop."""
        # Copies: an OrtValue on the CPU shares the memory of its array, which may be a mapped file.
        values = {name: value_on(array.copy(), self.device) for name, array in inputs.items()}
        binding = self.session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._names:
            if name in bound:
                binding.bind_ortvalue_output(name, values[bound[name]])
            else:
                binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        # Copies: the arrays may be views of the memory of the values.
        outputs = [array_of(value).copy() for value in binding.get_outputs()]
        return dict(zip(self._names, outputs, strict=True))

    def facts(self) -> Facts:
        """Return the execution providers of the session."""
        return {"providers": self.session.get_providers()}


def sdk() -> Any:
    """Import and return `onnxruntime` with telemetry off, unless the user sets the variable."""
    # With telemetry, importing it stores events in the user's home and sends them to the vendor.
    os.environ.setdefault(*NO_TELEMETRY)
    import onnxruntime

    return onnxruntime


def dtype_name(ort_type: str) -> str:
    """Return numpy's name of a dtype that ONNX Runtime calls ``"tensor(float)"`` or ``"float"``."""
    name = ort_type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def value_on(array: np.ndarray, device: str = "cpu") -> Any:
    """Return an array as an `OrtValue`.

    On the CPU the value shares the memory of the array, which must live as long.

    `array`: An array of any dtype and shape.
    """
    if array.dtype.name == "bfloat16":  # the numpy interface has none
        import numpy as np

        values = sdk().OrtValue
        on_host = values.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_BFLOAT16)
        if device == "cpu":
            return on_host
        on_device = values.ortvalue_from_shape_and_type(list(array.shape), ONNX_BFLOAT16, device)
        on_device.update_inplace(on_host)
        return on_device
    return sdk().OrtValue.ortvalue_from_numpy(array, device)


def array_of(value: Any) -> np.ndarray:
    """Return an `OrtValue` as an array of its shape and dtype; it may be a view of a CPU value."""
    if value.data_type() != BFLOAT16:
        array: np.ndarray = value.numpy()
        return array
    import ctypes

    import numpy as np

    from attn_export.tensorfile import numpy_dtype

    if value.device_name() != "cpu":
        on_host = value_on(np.empty(value.shape(), numpy_dtype("bfloat16")))
        on_host.update_inplace(value)
        value = on_host
    bits = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(bits, numpy_dtype("bfloat16")).reshape(value.shape())


def session_options(threads: int, graph: Path | None = None, *, spin: bool = False) -> Any:
    """Return the session options that all sessions have in common.

    `graph`: The file of the graph if it runs on the CPU. Some graphs need options for exact
    products of integers there.
    """
    options = sdk().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    # By default a product with dequantised weights rounds its inputs to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if graph is not None:
        from attn_export.runtimes.eight_bit_sums import entries_for

        for entry in entries_for(graph).items():
            options.add_session_config_entry(*entry)
    if not spin:
        # Spinning threads would take the cores from the process that computes the reference.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def with_options(session: Any, options: Options) -> Any:
    """Set options in session options; return the session options."""
    for name, value in options.items():
        if name == _OPTIMIZATION:
            level = getattr(sdk().GraphOptimizationLevel, f"ORT_{value.upper()}", None)
            if level is None:
                raise ValueError(
                    f"{name} is {value!r}; choose from disable_all, enable_basic, "
                    "enable_extended, enable_all"
                )
            session.graph_optimization_level = level
        elif "." in name:
            session.add_session_config_entry(name, value)
        else:
            # ONNX Runtime ignores names that it does not know. All that it knows have a dot.
            raise ValueError(
                f"there is no option {name!r}; it takes {_OPTIMIZATION}, and entries of a "
                "session's configuration such as session.set_denormal_as_zero"
            )
    return session
