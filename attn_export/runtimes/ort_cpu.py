"""ONNX Runtime, CPU execution provider."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import DIALECTS
from attn_export.runtimes.protocol import (
    Engine,
    Facts,
    Options,
    Unsupported,
    installed_version,
    unsupported,
)
from attn_export.system_info import install_command, missing_package

if TYPE_CHECKING:
    import numpy as np


OPTIMIZATION = "graph_optimization_level"
PROVIDER = "CPUExecutionProvider"
ERRORS_ONLY = 3
DISTRIBUTIONS = frozenset(
    f"onnxruntime{kind}" for kind in ("", "_gpu", "_directml", "_openvino", "_qnn", "_migraphx")
)
"""The packages that install the module `onnxruntime`, as their folders are named."""

PREPACK_UP_TO = 2**30
"""The largest size in bytes of a graph's folder at which sessions copy weights into the order that
kernels read fastest."""

NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")
BFLOAT16, ONNX_BFLOAT16 = "tensor(bfloat16)", 16
NO_BFLOAT16 = (
    "it has no kernel of this operator in bfloat16; of the graph, only the placement on CUDA in a "
    "dry run is known"
)


class OrtCpu:
    """`ort-cpu`."""

    name = "ort-cpu"
    device = "cpu"
    dialects = frozenset(DIALECTS)
    measured = "1.31.1"
    unsupported: Sequence[Unsupported] = (
        unsupported(
            "com.microsoft.GroupQueryAttention(q_norm_weight)",
            says="it has norms within this operator on CUDA and WebGPU only; of the graph, only "
            "the placement in a dry run is known",
        ),
        *(
            unsupported(f"{operator}(BFLOAT16)", says=NO_BFLOAT16)
            for operator in ("Attention", "com.microsoft.GroupQueryAttention")
        ),
    )
    counter_options: Mapping[str, Options] = {
        "graph optimisations off": {OPTIMIZATION: "disable_all"}
    }

    def version(self) -> str | None:
        """Return the version of onnxruntime or onnxruntime-gpu."""
        return installed_version("onnxruntime-gpu", "onnxruntime")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        # Not by `version()`: reading metadata takes as long as starting a session.
        spec = find_spec("onnxruntime")
        if spec is None or spec.origin is None:
            return missing_package("onnxruntime")
        return _conflict(Path(spec.origin).parents[1])

    def prepare(self) -> None:
        """Import the SDK."""
        sdk()

    def load(self, graph: Path, threads: int) -> Engine:
        """Make a session.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
        """
        return self.load_with(graph, threads, {})

    def load_with(self, graph: Path, threads: int, options: Options) -> Engine:
        """Make a session with entries of its configuration, or `OPTIMIZATION`: disable_all, ….

        Args:
            graph: The file of the graph.
            threads: The number of threads.
            options: Entries of the configuration, by name.
        """
        made = session_options(threads, graph)
        if _folder_bytes(graph) > PREPACK_UP_TO:
            # Packed weights are a copy for each session; else sessions share those in the file.
            made.add_session_config_entry("session.disable_prepacking", "1")
        return OrtEngine(graph, with_options(made, options), [PROVIDER])


def _conflict(site: Path) -> str:
    """Return what to do where several packages wrote the files of ONNX Runtime, or ""."""
    found = {path.name.partition("-")[0] for path in site.glob("onnxruntime*-*.dist-info")}
    several = sorted(name.replace("_", "-") for name in found & DISTRIBUTIONS)
    if len(several) < 2:
        return ""
    names = " and ".join(several)
    return (
        f"{names} are installed and overwrite each other's files; remove them "
        f"(pip uninstall {' '.join(several)}), then {install_command('attn-export[gpu]')}, "
        "or [cpu]"
    )


class OrtEngine(Engine):
    """An ONNX Runtime session."""

    device = "cpu"

    def __init__(self, graph: Path, options: Any, providers: list[Any]) -> None:
        self.session = sdk().InferenceSession(graph, options, providers=providers)
        self._names = [output.name for output in self.session.get_outputs()]
        ends = (*self.session.get_inputs(), *self.session.get_outputs())
        self._types = [end.type for end in ends]

    def run(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Run once.

        Args:
            inputs: The inputs, by name.
            bound: Names of outputs that share the buffer of an input, with that input.
        """
        if bound:
            return self._run_in_place(inputs, bound)
        if any(kind == BFLOAT16 for kind in self._types):
            return self._run_with_bfloat16(inputs)
        outputs = self.session.run(self._names, dict(inputs))
        return dict(zip(self._names, outputs, strict=True))

    def _run_with_bfloat16(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once, with bits in and out: its interface to numpy lacks bfloat16."""
        fed = {name: value_on(array) for name, array in inputs.items()}
        outputs = self.session.run_with_ort_values(self._names, fed)
        return {name: array_of(out) for name, out in zip(self._names, outputs, strict=True)}

    def _run_in_place(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Run once, some outputs in the buffers of inputs, as a decoding loop does."""
        # A value on the CPU shares the memory of its array, which may be a file's.
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
        # Copies: an array of a value on the CPU, as those of bfloat16 are, is a view of its memory.
        outputs = [array_of(value).copy() for value in binding.get_outputs()]
        return dict(zip(self._names, outputs, strict=True))

    def facts(self) -> Facts:
        """Return the execution providers of the session."""
        return {"providers": self.session.get_providers()}


def _folder_bytes(graph: Path) -> int:
    return sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file())


def sdk() -> Any:
    """Import and return the package, without its telemetry, unless the user enables it."""
    # Importing it collects events in the user's home, and sends them to its maker.
    os.environ.setdefault(*NO_TELEMETRY)
    import onnxruntime

    return onnxruntime


def value_on(array: np.ndarray, device: str = "cpu") -> Any:
    """Return a value of ONNX Runtime.

    On the CPU it shares the memory of the array, which must live as long.

    Args:
        array: Of any type and shape.
        device: ``"cpu"`` or ``"cuda"``.
    """
    if array.dtype.name == "bfloat16":  # its interface to numpy knows none
        import numpy as np

        values = sdk().OrtValue
        on_host = values.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_BFLOAT16)
        if device == "cpu":
            return on_host
        made = values.ortvalue_from_shape_and_type(list(array.shape), ONNX_BFLOAT16, device)
        made.update_inplace(on_host)
        return made
    return sdk().OrtValue.ortvalue_from_numpy(array, device)


def array_of(value: Any) -> np.ndarray:
    """Return the array of a value; it may be a view of the memory of a value on the CPU."""
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
    """Return the options of every session: errors only in the log.

    Args:
        threads: For computing; 0 for as many as ONNX Runtime chooses.
        graph: The file of the graph, if it runs on the CPU.
        spin: Whether waiting threads spin, as is best where runs follow each other closely.
    """
    options = sdk().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    # By default a product with dequantised weights rounds its inputs to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if graph is not None:
        from attn_export.runtimes.eight_bit_sums import entries_for

        for entry in entries_for(graph).items():
            options.add_session_config_entry(*entry)
    if not spin:
        # They would take the cores from the process that computes the truth.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def with_options(session: Any, options: Options) -> Any:
    """Add options to session options: `OPTIMIZATION`, or entries of the configuration.

    Args:
        session: Session options of ONNX Runtime; changed in place.
        options: The options, by name.

    Raises:
        ValueError: If there is no such level, or a name is certainly no entry.
    """
    for name, value in options.items():
        if name != OPTIMIZATION:
            # ONNX Runtime takes any name, and acts by those that it knows: all have a dot.
            if "." not in name:
                raise ValueError(
                    f"there is no option {name!r}; it takes {OPTIMIZATION}, and entries of a "
                    "session's configuration such as session.set_denormal_as_zero"
                )
            session.add_session_config_entry(name, value)
            continue
        level = getattr(sdk().GraphOptimizationLevel, f"ORT_{value.upper()}", None)
        if level is None:
            raise ValueError(
                f"{name} is {value!r}; choose from disable_all, enable_basic, enable_extended, "
                "enable_all"
            )
        session.graph_optimization_level = level
    return session
