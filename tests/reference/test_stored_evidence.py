"""What is stored of the evidence on a whole model: seeds and some positions, which still judge."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from attn_export.bundle.golden import (
    data_set,
    read_golden,
    read_index,
    read_inputs,
    stored_cases,
    write_index,
    write_inputs,
    write_outputs,
)
from attn_export.cases.draw import generator
from attn_export.errors import BundleError
from attn_export.judge.judge import judge
from attn_export.reference.stored_evidence import reduce_evidence, reduce_if_large, seed_words
from attn_export.results import BASE, Case, Golden
from attn_export.schema import Tolerance

TOLERANCE = Tolerance(1e-6, 1e-5)


def golden(name: str, length: int) -> Golden:
    """Return a case of two prompts, of which the second has two tokens less, padded on the left."""
    past = generator(*seed_words(name, "past")).standard_normal((2, 2, 300, 4)).astype(np.float32)
    ids = np.zeros((2, length), np.int64)
    random = np.random.default_rng(length)
    logits = random.standard_normal((2, length, 32)).astype(np.float32)
    present = random.standard_normal((2, 2, length, 4)).astype(np.float32)
    judged = {
        "logits": tuple(range(length + 2, 2 * length)),
        "present": tuple(2 * length + h * length + at for h in (0, 1) for at in range(2, length)),
    }
    case = Case(
        name, "shape", {"batch": 2}, {"ids": ids, "past": past, "window": np.array(8)}, "",
        ignored_rows=(1,),
    )  # fmt: skip
    expected = {"logits": logits, "present": present, "window": np.array(8)}
    tolerance = {"logits": TOLERANCE, "present": TOLERANCE, "window": None}
    return Golden(case, expected, expected, tolerance, {}, determined=judged)


GOLDENS = [golden("long", 40), golden(BASE, 9), golden("short", 3)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return golden vectors as they are written at first, with every position."""
    for number, one in enumerate(GOLDENS):
        write_inputs(tmp_path, number, one.case)
        write_outputs(tmp_path, number, one)
    write_index(tmp_path, GOLDENS)
    return tmp_path


def rows_of(one: Golden, name: str) -> np.ndarray:
    array = one.expected[name]
    return array.reshape(-1, array.shape[-1])[list(one.determined[name])]


def test_the_last_positions_are_stored_and_read_as_they_were(folder):
    before = [read_inputs(case, ["ids", "past", "window"]) for case in stored_cases(folder)[1]]
    (note,) = reduce_evidence(folder, 2**20)
    # Per case: 9 positions of 2 elements, in 1 row of logits and 2 of present; the second prompt of
    # the shortest has 1, the first 3.
    assert note == "stored evidence: 114 of 294 rows that were judged, of 3 of 3 cases"
    for one, back in zip(GOLDENS, read_golden(folder), strict=True):
        length = one.expected["logits"].shape[1]
        assert {length - 1, 2 * length - 1, 0, length + 2} <= set(back.determined["logits"])
        assert set(back.determined["logits"]).isdisjoint({length, length + 1})  # padding
        for name in ("logits", "present"):
            whole = one.expected[name].reshape(-1, one.expected[name].shape[-1])
            assert (rows_of(back, name) == whole[list(back.determined[name])]).all()
        assert back.expected["window"] == 8
    after = [read_inputs(case, ["ids", "past", "window"]) for case in stored_cases(folder)[1]]
    for a, b in zip(before, after, strict=True):
        assert all((a[name] == b[name]).all() for name in a)
    assert not list(folder.rglob("eager_*"))
    assert len(list(folder.rglob("input_1.seed"))) == 3
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 60_000


@pytest.mark.parametrize(("budget", "kept"), [(1000, {39, 79}), (2000, {39, 79, 0, 42})])
def test_of_little_space_the_last_position_comes_first_and_then_the_first(budget, kept, folder):
    reduce_evidence(folder, budget)
    (back,) = (each for each in read_golden(folder) if each.case.name == "long")
    assert set(back.determined["logits"]) == kept


@pytest.mark.parametrize(("row", "status"), [(39, "failed"), (79, "failed"), (40, "passed")])
def test_a_wrong_row_fails_unless_it_is_padding(row, status, folder):
    reduce_evidence(folder, 2**20)
    back = read_golden(folder)[0]
    outputs = {name: array.copy() for name, array in GOLDENS[0].expected.items()}
    outputs["logits"].reshape(-1, 32)[row] *= 1.001
    found = {v.output: v.status for v in judge("ort-cpu", "model.onnx", back, outputs)}
    assert found == {"logits": status, "present": "passed", "window": "passed"}


def test_right_rows_with_most_of_the_tolerance_pass_alone(folder):
    reduce_evidence(folder, 2**20)
    outputs = {name: array * np.float32(1 + 8e-6) for name, array in GOLDENS[0].expected.items()}
    outputs["window"] = np.array(8)
    verdicts = judge("ort-cpu", "model.onnx", read_golden(folder)[0], outputs)
    assert {v.status for v in verdicts} == {"passed"}


def test_little_space_keeps_fewer_positions_and_then_fewer_cases(folder):
    assert "of 3 of 3 cases" in reduce_evidence(folder, 1500)[0]
    assert sum(len(g.determined["logits"]) for g in read_golden(folder)) == 6  # the last ones


def test_the_base_case_is_kept_before_others(folder):
    index = json.loads((folder / "index.json").read_text())
    for entry in index["cases"]:
        entry["sizes"] = {}  # else cases of other sizes are kept, too
    (folder / "index.json").write_text(json.dumps(index))
    assert "of 1 of 3 cases" in reduce_evidence(folder, 400)[0]
    (entry,) = read_index(folder).cases
    assert (entry.name, entry.folder) == (BASE, data_set(1))
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", data_set(1)]


def test_a_case_of_each_pattern_is_kept_too(folder):
    index = json.loads((folder / "index.json").read_text())
    for entry in index["cases"]:
        entry["contents"] = ["sharp"]  # the first has it, as the others do
    (folder / "index.json").write_text(json.dumps(index))
    reduce_evidence(folder, 400)
    assert [x.name for x in read_index(folder).cases] == [index["cases"][0]["name"], BASE]


def test_whole_cases_and_positions_of_others_stay_within_the_limit(folder):
    whole = sum(file.stat().st_size for file in (folder / data_set(1)).iterdir())  # the base case
    most = whole + 1500  # a half of it would be more than is left
    reduce_if_large(folder, most)
    others = [*folder.glob(f"{data_set(0)}/output_*"), *folder.glob(f"{data_set(2)}/output_*")]
    assert 0 < sum(file.stat().st_size for file in others) <= 1500


def test_small_cases_stay_whole_for_tools_that_read_them(folder):
    assert reduce_if_large(folder, 10**9) == ()
    size = sum(file.stat().st_size for file in folder.glob("*/*"))
    (note,) = reduce_if_large(folder, size - 1)
    assert note.endswith("of 3 of 3 cases, 1 of them whole")
    long, base, short = read_index(folder).cases
    assert (set(long.shapes), base.shapes) == ({"logits", "present"}, {})
    assert short.shapes
    one, back = GOLDENS[1], read_golden(folder)[1]
    assert (back.case.ignored_rows, back.determined) == ((1,), one.determined)
    assert all((back.expected[n] == array).all() for n, array in one.expected.items())
    assert (folder / data_set(1) / "eager_0.pb").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crc32": 1}, "draws other values"),
        ({"dims": [2, 2, 2**20, 400]}, "more than"),
        ({"seed": -1}, "seed"),
        ({"name": "ids"}, "expected 'past'"),
    ],
)
def test_a_changed_seed_is_refused(change, message, folder):
    reduce_evidence(folder, 2**20)
    path = folder / data_set(0) / "input_1.seed"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BundleError, match=message):
        read_inputs(stored_cases(folder)[1][0], ["ids", "past", "window"])


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": {"logits": [2, 40, 31]}},
        {"shapes": {"logits": [2, 3, 32]}},
        {"shapes": {"logits": [2, 2**20, 2**20, 32]}},
        {"determined": {"logits": [1]}},
    ],
)
def test_a_changed_index_is_refused(change, folder):
    reduce_evidence(folder, 2**20)
    index = json.loads((folder / "index.json").read_text())
    for key, value in change.items():
        index["cases"][0][key] |= value
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(BundleError, match="cannot be read"):
        read_golden(folder)
