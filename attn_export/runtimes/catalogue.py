"""Every runtime, by name."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING

from attn_export.errors import UsageError

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Runtime

CLASSES = {
    "ort-cpu": ("ort_cpu", "OrtCpu"),
    "ort-cuda": ("ort_cuda", "OrtCuda"),
    "c": ("native", "C"),
    "cpp": ("native", "Cpp"),
    "node": ("javascript", "Node"),
    "wasm": ("javascript", "Wasm"),
    "webgpu": ("javascript", "WebGpu"),
    "onnx-reference": ("onnx_reference", "OnnxReference"),
    "openvino": ("openvino", "OpenVino"),
    "tract": ("tract", "Tract"),
    "opencv": ("opencv", "OpenCv"),
    "iree": ("iree", "Iree"),
    "mnn": ("mnn", "Mnn"),
}
"""The module and the class of each runtime, by name. A module is imported when its runtime is first
used: importing all of them takes a tenth of the time of `verify`."""

SINGLE_NODES = {"pytorch": ("pytorch", "PyTorch")}
"""Runtimes that only run graphs of a single node, as a reference for `probe`. The name `all` does
not include them."""

DEFAULT = ("ort-cpu", "ort-cuda")
"""The runtimes of a job that names none. Without a GPU, ort-cuda is reported as not run."""


@functools.cache
def runtime(name: str) -> Runtime:
    """Return the runtime of this name.

    `name`: One of `CLASSES` or `SINGLE_NODES`; ``ort-cpu@CPU`` on an emulated CPU;
    ``ort-cpu==VERSION`` for another release than the installed one.
    """
    base, at, cpu = name.partition("@")
    if at and base == "ort-cpu":
        from attn_export.runtimes.emulated_cpu import EmulatedCpu

        return EmulatedCpu(cpu)
    base, is_release, version = name.partition("==")
    if is_release and base in CLASSES:
        from attn_export.runtimes.release import Release

        return Release(runtime(base), version)
    if name not in CLASSES | SINGLE_NODES:
        raise UsageError(f"unknown runtime {name!r}; choose from {', '.join(CLASSES)}, all")
    module, class_name = (CLASSES | SINGLE_NODES)[name]
    instance: Runtime = getattr(import_module(f"attn_export.runtimes.{module}"), class_name)()
    return instance


def all_runtimes() -> tuple[Runtime, ...]:
    """Return the runtimes of `CLASSES`, whose modules are then imported."""
    return tuple(runtime(name) for name in CLASSES)
