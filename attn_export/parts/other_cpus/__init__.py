"""Other CPUs: ONNX Runtime on emulated processors, and a compiler of kits for arm64."""

from attn_export.parts import Part

PART = Part(
    runtimes={"ort-cpu@CPU": f"{__name__}.emulated_cpu"},
    installs=dict.fromkeys(("cpus", "arm64-compiler"), f"{__name__}.install_cpus"),
    tests_need=("cpus",),
)
