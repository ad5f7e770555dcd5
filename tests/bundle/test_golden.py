"""Golden vectors on disk: they are read back as written, and damaged ones are errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attn_export.bundle.golden import (
    INDEX,
    read_golden,
    stored_cases,
    write_index,
    write_inputs,
    write_outputs,
)
from attn_export.commands.judge_graphs import tried_note
from attn_export.errors import BundleError
from attn_export.results import Case, Golden
from attn_export.schema import Tolerance
from attn_export.tensorfile import read_outputs, read_tensors, write_tensors

FOLDER = "test_data_set_0"


def golden(name: str, kind: str, batch: int) -> Golden:
    rng = np.random.default_rng(batch)
    inputs = {
        "query": rng.standard_normal((batch, 2, 4)).astype(np.float32),
        "attn_mask": rng.random((batch, 1, 1, 2)) < 0.5,
    }
    expected = {
        "output": rng.standard_normal((batch, 2, 4)).astype(np.float32),
        "present_key": np.zeros((batch, 1, 0, 4), np.float32),
    }
    eager = {name: array + 1 for name, array in expected.items()}
    about, rows = f"about {name}", tuple(range(1, batch))
    sizes = {"batch": batch}
    case = Case(name, kind, sizes, inputs, about, contents=("sharp",), ignored_rows=rows)
    tolerance = {"output": Tolerance(1.25e-7, 3e-300), "present_key": None}
    uncompared = {"present_key": "eager is not finite"} if kind == "probe" else {}
    return Golden(case, expected, eager, tolerance, uncompared)


GOLDENS = [golden("shape_B1", "shape", 1), golden("shape_B2", "shape", 2), golden("é", "probe", 3)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return golden vectors as they were written."""
    return write_all(tmp_path / "golden")


def write_all(folder: Path) -> Path:
    """Write all golden vectors, and return their folder."""
    for number, one in enumerate(GOLDENS):
        write_inputs(folder, number, one.case)
        write_outputs(folder, number, one)
    write_index(folder, GOLDENS)
    return folder


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(
        (a[n].dtype, a[n].shape, a[n].tobytes()) == (b[n].dtype, b[n].shape, b[n].tobytes())
        for n in a
    )


# -- there and back ---------------------------------------------------------------------------


def test_everything_but_the_inputs_comes_back(folder):
    found = read_golden(folder)
    assert len(found) == len(GOLDENS)
    for back, one in zip(found, GOLDENS, strict=True):
        assert (back.case.name, back.case.kind) == (one.case.name, one.case.kind)
        assert (back.case.sizes, back.case.about) == (one.case.sizes, one.case.about)
        assert (back.case.contents, back.case.ignored_rows) == (("sharp",), one.case.ignored_rows)
        assert back.case.inputs == {}
        assert same(back.expected, one.expected)
        assert same(back.eager, one.eager)
        assert back.tolerance == one.tolerance
        assert back.uncompared == one.uncompared


def test_the_index_alone_says_where_the_inputs_of_every_case_lie(folder):
    names, cases = stored_cases(folder)
    assert names == ["query", "attn_mask"]
    for stored, one in zip(cases, GOLDENS, strict=True):
        assert (stored.name, stored.sizes) == (one.case.name, one.case.sizes)
        assert same(read_tensors(stored.folder, "input", names), one.case.inputs)


def test_the_layout_is_that_of_the_backend_tests_of_onnx(folder):
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*.pb")}
    assert written == {
        f"test_data_set_{case}/{stem}_{number}.pb"
        for case in range(3) for stem in ("input", "output", "eager") for number in range(2)
    }  # fmt: skip
    for number, one in enumerate(GOLDENS):
        for index, (name, array) in enumerate(one.expected.items()):
            path = folder / f"test_data_set_{number}" / f"output_{index}.pb"
            tensor = onnx.TensorProto.FromString(path.read_bytes())
            assert tensor.name == name
            np.testing.assert_array_equal(numpy_helper.to_array(tensor), array)


def test_the_index_is_json_without_paths_of_the_machine(folder):
    text = (folder / INDEX).read_text(encoding="utf-8")
    assert str(folder.parent) not in text
    assert json.loads(text)["cases"][0]["folder"] == "test_data_set_0"
    assert text.endswith("}\n")


def test_the_same_vectors_give_the_same_bytes(folder, tmp_path):
    write_all(tmp_path / "again")
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) == 3 * 6 + 1
    assert all((folder / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)


def test_outputs_of_a_runtime_come_back_under_the_names_that_they_carry(tmp_path):
    arrays = {"b": np.arange(3), "a": np.ones((2, 0), np.float32)}
    write_tensors(tmp_path, "output", arrays)
    assert same(read_outputs(tmp_path, 2), arrays)
    assert list(read_outputs(tmp_path, 1)) == ["b"]


def test_inputs_are_not_written_over(folder):
    with pytest.raises(FileExistsError):
        write_inputs(folder, 0, GOLDENS[0].case)


@pytest.mark.parametrize("error", [np.inf, 1e9])
def test_errors_too_large_for_evidence_come_back_for_the_judge_to_say_so(error: float, folder):
    of_case(allowed={"output": {"whole": error, "row": 1e-6}, "present_key": None})(folder)
    (back,) = read_golden(folder)
    assert back.tolerance["output"].whole == pytest.approx(error, nan_ok=True)


# -- damage -----------------------------------------------------------------------------------


def cut(path: Path, count: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def swap(path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def edit_index(change):
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        (folder / INDEX).write_text(json.dumps(change(index)), encoding="utf-8")

    return damage


def of_case(**values):
    return edit_index(lambda index: {**index, "cases": [index["cases"][0] | values]})


FILE_DAMAGE = {
    "an output missing": lambda folder: (folder / "test_data_set_1/output_0.pb").unlink(),
    "an output cut off": lambda folder: cut(folder / "test_data_set_1/output_0.pb"),
    "an output empty": lambda folder: (folder / "test_data_set_1/output_0.pb").write_bytes(b""),
    "eager missing": lambda folder: (folder / "test_data_set_2/eager_1.pb").unlink(),
    "two outputs swapped": lambda folder: swap(
        folder / "test_data_set_0/output_0.pb", folder / "test_data_set_0/output_1.pb"
    ),
    "an output of a case that is no folder": of_case(folder="elsewhere"),
    "no list of outputs": edit_index(lambda index: {**index, "outputs": 5}),
    "another output": edit_index(lambda index: {**index, "outputs": ["present_key"]}),
    "a row ignored that is not there": of_case(ignored_rows=[1]),
}
INDEX_DAMAGE = {
    "no index": lambda folder: (folder / INDEX).unlink(),
    "an index cut off": lambda folder: cut(folder / INDEX, 3),
    "an index of bytes": lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe"),
    "an empty index": lambda folder: (folder / INDEX).write_bytes(b""),
}
SHAPELESS = {
    "an index that is a list": edit_index(lambda index: [index]),
    "an index that is a number": edit_index(lambda _: 5),
    "an index without cases": edit_index(lambda index: {"inputs": index["inputs"]}),
    "cases that are no list": edit_index(lambda index: {**index, "cases": 5}),
    "a case that is no table": edit_index(lambda index: {**index, "cases": [7]}),
    "a case without a folder": edit_index(lambda index: {**index, "cases": [{"name": "x"}]}),
    "no cases": edit_index(lambda index: {**index, "cases": []}),
    "two cases of one name": edit_index(
        lambda index: {**index, "cases": [{**c, "name": "x"} for c in index["cases"]]}
    ),
    "two cases in one folder": edit_index(
        lambda index: {**index, "cases": [{**c, "folder": FOLDER} for c in index["cases"]]}
    ),
    "a folder elsewhere": of_case(folder=f"../{FOLDER}"),
    "a size below 0": of_case(sizes={"batch": -1}),
    "a name that is a number": of_case(name=5),
    "a row below 0": of_case(ignored_rows=[-1]),
    "a row that is a text": of_case(ignored_rows=["0"]),
    "rows that are none": of_case(ignored_rows=None),
    "no reason": of_case(unusable={"output": " "}),
    "an output without an error": of_case(allowed={"present_key": None}),
    **{
        f"an error of {error!r}": of_case(
            tolerance={"output": {"whole": 1e-6, "row": error}, "present_key": None}
        )
        for error in (0.0, -1e-6, "1e-6", None, True, 10**400)
    },
    "an error of the whole alone": of_case(
        tolerance={"output": {"whole": 1e-6}, "present_key": None}
    ),
}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(d, id=n) for n, d in (FILE_DAMAGE | INDEX_DAMAGE | SHAPELESS).items()],
)
def test_damaged_vectors_are_refused_with_the_folder_named(damage, folder):
    damage(folder)
    with pytest.raises(BundleError) as caught:
        read_golden(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tolerances_that_are_no_table_are_refused(folder):
    of_case(allowed=[])(folder)
    with pytest.raises(BundleError):
        read_golden(folder)


@pytest.mark.parametrize("damage", [pytest.param(d, id=n) for n, d in INDEX_DAMAGE.items()])
def test_stored_cases_without_a_readable_index_are_refused(damage, folder):
    damage(folder)
    with pytest.raises(BundleError, match=r"index\.json (cannot be read|was changed)"):
        stored_cases(folder)


@pytest.mark.parametrize("damage", [pytest.param(d, id=n) for n, d in SHAPELESS.items()])
def test_stored_cases_with_another_index_are_refused(damage, folder):
    damage(folder)
    with pytest.raises(BundleError):
        stored_cases(folder)


NOTES = {
    "batch 1, n 1-9; batch 2, n 1-8; batch 3, n 5": [(1, 1), (1, 9), (2, 1), (2, 8), (3, 5)],
    "batch 1-2, n 1-9; batch 3, n 9; batch 4-64, n 2": [
        (1, 1), (1, 9), (2, 1), (2, 9), (3, 9), (4, 2), (64, 2),
    ],
    "batch 1, n 7; batch 2, n 8; batch 3, n 7": [(1, 7), (2, 8), (3, 7)],
}  # fmt: skip


@pytest.mark.parametrize("note", NOTES)
def test_the_note_on_sizes_does_not_join_sizes_that_were_not_tried_together(note: str):
    sizes = ({"batch": batch, "n": length} for batch, length in NOTES[note])
    cases = [Case("one", "shape", each, {}, "") for each in sizes]
    assert tried_note(cases, "batch") == f"sizes: {note}"
