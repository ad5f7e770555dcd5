"""`compare --inputs`: inputs of the user's own are cases of modules and files, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from compared import INPUTS, E, export, good_graph, subject
from conftest import on
from torch import nn

from attn_export import Subject
from attn_export.commands.compare import compare
from attn_export.errors import UsageError
from attn_export.export.given_inputs import own_cases

X = np.random.default_rng(0).standard_normal((1, 21, E)).astype("f4")
GOOD = {"x": X, "y": X[:, :4]}


@pytest.mark.parametrize("of_file", [False, True], ids=["module", "file"])
def test_arrays_of_the_user_are_a_case(tmp_path: Path, of_file: bool):
    path, graph = tmp_path / "a.npz", good_graph(dynamic=not of_file)
    np.savez(path, **{name: tensor.numpy() for name, tensor in INPUTS.items()})
    reference = graph if of_file else subject()
    report = compare(reference, graph, on("ort-cpu"), inputs=[str(path)])
    assert report.passed
    assert "own_inputs_1" in {verdict.case for verdict in report.verdicts}


def test_several_sets_come_from_a_function(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "def sets():\n"
        f"    return [{{'x': np.ones((1, n, {E})), 'b': np.ones((1, 2, {E}))}} for n in (3, 5)]\n"
    )
    found = own_cases([f"{path}:sets"], subject().interface(), {"x": "a", "y": "b"}, "the module")
    assert [(case.name, case.sizes["query_len"]) for case in found] == [
        ("own_inputs_1", 3), ("own_inputs_2", 5),
    ]  # fmt: skip
    assert [*found[0].inputs] == ["x", "y"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "lacks y; the inputs of the module are x, y"),
        ({**GOOD, "z": X}, "another name: z"),
        ({**GOOD, "y": X[..., :3]}, "y is float32 [1, 21, 3]; the module takes float32"),
        ({**GOOD, "y": X.repeat(2, 0)}, "batch is 1 in x and 2 in y; give one size"),
        ({**GOOD, "y": X * np.nan}, "y holds NaN; give numbers"),
        ({**GOOD, "y": X.astype("f8") * 1e300}, "y holds a number that float32 does not"),
        ({**GOOD, "y": X.astype("U3")}, "y is <U3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_with_what_to_do(tmp_path: Path, arrays, message):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(UsageError) as error:
        own_cases([str(path)], subject().interface(), {}, "the module")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1]", "prompts are for --model; give FILE.npz"),
        ("a.npz", b"PK", "is not a .npz file"),
        ("none.npz", None, "No such file"),
        ("a.bin", b"", "--inputs is FILE.npz or PATH.py:FUNCTION"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path: Path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        own_cases([str(tmp_path / name)], subject().interface(), {}, "the module")
    assert message in str(error.value)


def test_what_the_module_refuses_is_said_in_a_line(tmp_path: Path):
    path, graph = tmp_path / "a.npz", tmp_path / "g.onnx"
    table, ids = nn.Embedding(4, 8).eval(), torch.tensor([[0, 3, 1]])
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": [1], "y": [1]}}
    export(table, (ids,), str(graph), dynamo=False, **names)
    np.savez(path, input=[[9]])
    module = Subject(table, {"input": ids}, {"input": {1: "length"}}, ["y"])
    with pytest.raises(UsageError, match=r"a\.npz: the module refuses them: .*out of range"):
        compare(module, graph, on("ort-cpu"), inputs=[str(path)])
