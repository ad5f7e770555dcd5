"""CUDA without a GPU: ONNX Runtime's provider over stand-in libraries that compute nothing."""

from attn_export.optional_parts import Part

PART = Part(
    commands={"dry-run": f"{__name__}.dry_run_command"},
    installs={"cuda-dry-run": f"{__name__}.install_cuda_stand_in"},
    tests_need=("cuda-dry-run",),
)
