"""Other CPUs: ONNX Runtime on emulated processors, and a compiler of kits for arm64."""

from attn_export.optional_parts import Part

PART = Part(
    runtimes={"ort-cpu@CPU": f"{__name__}.emulated_cpu"},
    installs=dict.fromkeys(("cpus", "arm64-compiler", "ort-cpu@CPU"), f"{__name__}.install_cpus"),
    tests_need=("ort-cpu@haswell", "ort-cpu@neoverse-n1"),
)
