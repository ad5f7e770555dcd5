"""The packages that the processes of a benchmark load."""

from __future__ import annotations

import pytest
from package_files import loaded_by


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("bench", "torch onnx_ir onnxruntime rich openvino"),
        ("candidate_worker", "torch onnx onnxruntime"),
        ("measuring_commands", "torch numpy onnx onnx_ir onnxruntime rich jinja2"),
    ],
)
def test_a_module_starts_without_what_it_does_not_need(module: str, without: str):
    loaded = loaded_by(f"import attn_export.parts.benchmarks.{module}")
    assert loaded & set(without.split()) == set()
