"""What the READMEs of kits say of the graph that the kit loads."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from readmes import shapes
from shared import swapped_bundle

from attn_export.parts.kits.kit import LANGUAGES, write_kit


@pytest.mark.parametrize("language", LANGUAGES)
def test_shapes_are_those_of_the_graph(language: str, tmp_path: Path):
    dialect = "ort" if "ort" in LANGUAGES[language].dialects else None
    kit = write_kit(language, swapped_bundle(), tmp_path / "kit", dialect)
    named = "".join(path.read_text() for path in kit.glob("[Rk]*.[mj]*"))  # README.md, kit.json
    (graph,) = (
        onnx.load(path).graph for path in (kit / "bundle").glob("*.onnx")
        if path.name in named and ".decode." not in path.name
    )  # fmt: skip
    declared = {
        (end.name, tuple(d.dim_param or str(d.dim_value) for d in end.type.tensor_type.shape.dim))
        for end in (*graph.input, *graph.output)
    }
    assert shapes(kit) == declared
