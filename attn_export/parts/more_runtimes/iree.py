"""IREE, on the CPU. The graph is compiled for this CPU in memory first."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import PORTABLE
from attn_export.runtimes.protocol import Engine, PackagedRuntime
from attn_export.system_info import missing_package

if TYPE_CHECKING:
    import numpy as np

FLAGS = ("--iree-llvmcpu-target-cpu=host",)


class _Iree(PackagedRuntime):
    """The runtime `iree`."""

    name = "iree"
    about = "IREE, which compiles a graph for this CPU"
    packages = ("iree-base-compiler[onnx]", "iree-base-runtime")
    modules = ("iree.compiler", "iree.compiler.extras.onnx_importer", "iree.runtime")
    dialects = frozenset({PORTABLE})
    measured = "3.13.0"
    unsupported: Mapping[str, str] = {
        "Range with Sin": "its sines are not precise enough from position 63 on",
    }

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        modules = ("iree", "iree.compiler", "iree.runtime")
        return "" if all(map(find_spec, modules)) else missing_package("IREE", *self.packages)

    def engine(self, graph: Path, threads: int) -> Engine:
        """Return a graph that was compiled for this CPU, which takes some seconds."""
        import iree.compiler
        import iree.runtime
        import onnx

        from attn_export.graph.load import load_model

        proto = onnx.shape_inference.infer_shapes(load_model(graph), data_prop=True)
        names = [value.name for value in proto.graph.input]
        program = iree.compiler.compile_str(
            _torch_dialect(proto), target_backends=["llvm-cpu"], extra_args=list(FLAGS)
        )
        iree.runtime.flags.parse_flags(f"--task_topology_max_group_count={threads}")
        config = iree.runtime.Config("local-task")
        module = iree.runtime.VmModule.copy_buffer(config.vm_instance, program)
        main = iree.runtime.load_vm_module(module, config)[proto.graph.name]

        # The device lives as long as the function.
        def run(
            inputs: Mapping[str, np.ndarray], _: object = config.device
        ) -> dict[str, np.ndarray]:
            result = main(*(inputs[name] for name in names))
            outputs = result if isinstance(result, (tuple, list)) else [result]
            arrays = (output.to_host() for output in outputs)
            return dict(zip((v.name for v in proto.graph.output), arrays, strict=True))

        precise = "as the graph says"
        return Engine(run, {"device": "CPU (local-task)", "precision": precise, "flags": FLAGS})


RUNTIME = _Iree


def _torch_dialect(proto: Any) -> bytes:
    """Convert a graph to MLIR bytecode in the torch dialect, which the compiler reads."""
    import io

    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    info = onnx_importer.ModelInfo(proto)
    module = info.create_module(context=Context()).operation
    onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
    code = io.BytesIO()
    module.write_bytecode(code)
    return code.getvalue()
