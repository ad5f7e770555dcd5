"""Files that are no graph, or no longer one: one line each, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_graphs import exported, saved

from attn_export.errors import AttnExportError
from attn_export.graph.checks import check_graph


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> bytes:
    """Return the canonical graph of a small spec."""
    return saved(tmp_path_factory.mktemp("healthy")).read_bytes()


def refusal_of(path: Path) -> str:
    with pytest.raises(AttnExportError) as caught:
        check_graph(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_a_truncated_graph_is_refused(part, data, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: int(len(data) * part)])
    assert "is not an ONNX model" in refusal_of(path)


@pytest.mark.parametrize(
    "name", ["model.onnx", "model", "model.txt", "model.json", "model.textproto", "model.onnxtxt"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"hello\nworld\n", b"\x89PNG\r\n\x1a\n" + b"\0" * 99],
    ids=["empty", "text", "image"],
)
def test_a_file_of_another_kind_is_refused(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    assert "is not an ONNX model" in refusal_of(path)


def test_a_missing_file_is_refused_with_the_reason(tmp_path):
    assert "no such file" in refusal_of(tmp_path / "model.onnx")


def test_a_folder_is_refused_with_the_reason(tmp_path):
    (tmp_path / "model.onnx").mkdir()
    assert "model.onnx is a folder; give an ONNX file in it" in refusal_of(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(b"Shape.out", b"Sh\xff\xfee.out", id="a value that is not UTF-8"),
        pytest.param(b'"\x06Expand', b'"\x06Exp\xffnd', id="an operator that is not UTF-8"),
        pytest.param(
            b"\x09attn_mask\x12",
            b"\x09attn\xffmask\x12",
            id="an input that is not UTF-8",
        ),
        pytest.param(b"\x10\x07B", b"\x10\x6fB", id="a type of tensor that does not exist"),
        pytest.param(b"\x10\x07B", b"\x10\x00B", id="a tensor without a type"),
        pytest.param(
            b"\x08\x20\x08\x20\x10\x01B", b"\x08\x20\x08\x21\x10\x01B", id="a tensor of other sizes"
        ),
    ],
)
def test_a_damaged_graph_has_findings_or_is_refused(before, after, data, tmp_path):
    head, found, tail = data.rpartition(before)
    assert found
    assert len(before) == len(after)
    path = tmp_path / "model.onnx"
    path.write_bytes(head + after + tail)
    try:
        findings = check_graph(path, exported()[0].expected())
    except AttnExportError:
        return
    assert findings
