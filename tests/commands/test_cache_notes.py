"""Notes on caches that a module writes itself."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from attn_export.commands.bundle_graphs import cache_notes

WRITES = {
    "ScatterND": "present = ScatterND(past_key, ids, new)",
    "ScatterElements": "present = ScatterElements<axis=2>(past_key, ids, new)",
    "Where": "present = Where(seen, new, past_key)",
    "ScatterND between moves": """
        turned = Transpose<perm=[2, 1, 0, 3]>(past_key)
        written = ScatterND(turned, ids, new)
        back = Transpose<perm=[2, 1, 0, 3]>(written)
        present = Identity(back)""",
}


def notes_on(write: str) -> list[str]:
    text = f"""<ir_version: 10, opset_import: ["": 23]>
        g (float[b, h, l, d] query, float[b, h, s, d] past_key, int64[a, c] ids,
           bool[b, h, s, d] seen, float[b, h, s, d] x)
        => (float[b, h, l, d] y, float[b, h, s, d] present)
        {{ new = Neg(x) {write} }}"""
    return list(cache_notes(ir.from_proto(onnx.parser.parse_model(text))))


@pytest.mark.parametrize("name", WRITES)
def test_a_cache_is_named_with_the_operator_that_writes_it(name: str):
    (note,) = notes_on(f"{WRITES[name]}\n y = Attention(query, present, present)")
    assert f"past_key is written at indices of the module's own ({name.split()[0]})" in note
    assert "not bound in place" in note


def test_a_result_that_nothing_reads_is_no_cache():
    assert not notes_on(f"{WRITES['Where']}\n y = Attention(query, new, new)")
