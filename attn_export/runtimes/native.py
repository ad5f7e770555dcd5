"""ONNX Runtime in C and C++: programs over its APIs, those of the kits `c` and `cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.dialect_names import CUDA, DIALECTS
from attn_export.runtimes.install_folder import home
from attn_export.runtimes.install_ort_native import not_ready, program_of
from attn_export.runtimes.program import ProgramEngine
from attn_export.runtimes.protocol import installed_version

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Engine, Unsupported


# -- ONNX Runtime in C: a program over its C API, that of the kit `c` ---------------------------


class C:
    """`c`."""

    name = "c"
    device = "cpu"
    dialects = frozenset(DIALECTS) - {CUDA}
    measured = "1.31.1"
    unsupported: Sequence[Unsupported] = ()

    def version(self) -> str | None:
        """Return the version of the wheel whose library the program uses."""
        return installed_version("onnxruntime-gpu", "onnxruntime")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return not_ready(self.name, home())

    def prepare(self) -> None:
        """Do nothing: the program is started with its graph."""

    def load(self, graph: Path, threads: int) -> Engine:
        """Start the program.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
        """
        return ProgramEngine([program_of(self.name, home())], graph, threads)


# -- ONNX Runtime in C++: a program over its C++ API, that of the kit `cpp` ---------------------


class Cpp(C):
    """`cpp`."""

    name = "cpp"
