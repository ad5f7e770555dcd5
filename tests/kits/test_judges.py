"""The rule of the judge in JavaScript is that of `attn_export.parity.judge`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from attn_export.kits.languages import HERE
from attn_export.nouns import Allowed, Case, Golden
from attn_export.parity.judge import judge

ALLOWED = Allowed(whole=1e-3, row=2e-3)
INF, NAN = np.inf, np.nan


def arrays() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """A name, a truth and what an engine gave."""
    rng = np.random.default_rng(0)
    t = rng.standard_normal((3, 4, 5)).astype(np.float32)
    for error in (0.0, 1e-4, 9e-4, 1.1e-3, 5e-3, 1.0):
        yield f"error {error}", t, (t * (1 + error)).astype(np.float32)
    one_row = t.copy()
    one_row[1, 2] *= 1.003
    yield "one row", t, one_row
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        yield f"{np.dtype(dtype)} right", t.astype(dtype), t.astype(dtype)
        yield f"{np.dtype(dtype)} wrong", t.astype(dtype), (t * 1.05).astype(dtype)
    zero = t.copy()
    zero[0, 1] = 0
    yield "a zero row", zero, zero
    tiny = zero.copy()
    tiny[0, 1, 3] = 1e-30
    yield "a zero row that is not", zero, tiny
    yield "all zero", np.zeros_like(t), np.zeros_like(t)
    yield "all zero, negative", np.zeros_like(t), -np.zeros_like(t)
    for what in (NAN, INF, -INF):
        there = zero.copy()
        there[0, 1, 2] = there[2, 3, 0] = what
        yield f"{what} in its place", there, there
        yield f"{what} out of nowhere", zero, there
        yield f"{what} is lost", there, zero
        beside = there.copy()
        beside[0, 1, 0] = 1e-3
        yield f"{what} in a row of zeros that is not", there, beside
    huge = (t * 1e30).astype(np.float32) * np.float32(1e7)
    yield "squares overflow", huge, huge * np.float32(1.0005)
    small = (t * 1e-38).astype(np.float32)
    yield "denormal", small, small
    for dtype in (np.bool_, np.int64, np.uint8, np.int32):
        whole = np.arange(6).reshape(2, 3).astype(dtype)
        other = whole.copy()
        other[1, 1] = not other[1, 1] if dtype == np.bool_ else other[1, 1] + 1
        yield f"{np.dtype(dtype)} equal", whole, whole
        yield f"{np.dtype(dtype)} unequal", whole, other
    large = np.array([2**60 + 1])
    yield "int64 beyond float64", large, large - 1
    yield "empty", np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 3), np.float32)
    yield "another empty shape", np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 4), np.float32)
    yield "another shape", t, t.reshape(3, 5, 4)
    yield "another dtype", t, t.astype(np.float64)
    yield "a scalar", np.float32(2).reshape(()), np.float32(2.1).reshape(())


CASES = list(arrays())


def golden_of(name: str, truth: np.ndarray, **unusable: str) -> Golden:
    floating = truth.dtype.kind == "f" or truth.dtype.name == "bfloat16"
    allowed = {"y": ALLOWED if floating else None}
    return Golden(Case(name, "shape", {}, {}, ""), {"y": truth}, {"y": truth}, allowed, unusable)


def told(array: np.ndarray) -> dict[str, object]:
    return {
        "type": array.dtype.name, "dims": list(array.shape),
        "hex": np.ascontiguousarray(array).tobytes().hex(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def said(need_node: None) -> list[dict[str, object]]:
    """What the JavaScript says of every case."""
    allowed = {"whole": ALLOWED.whole, "row": ALLOWED.row}
    cases = [
        {
            "expected": {"y": told(truth)}, "outputs": {"y": told(got)}, "unusable": {},
            "allowed": {"y": allowed if golden_of(name, truth).allowed["y"] else None},
        }
        for name, truth, got in CASES
    ]  # fmt: skip
    cases.append({**cases[5], "unusable": {"y": "eager is NaN"}})
    cases.append({**cases[0], "outputs": {}})
    cases.append({**cases[0], "outputs": {**cases[0]["outputs"], "z": cases[0]["outputs"]["y"]}})
    cases.append({**cases[0], "allowed": {"y": None}})
    js = HERE / "js"
    done = subprocess.run(
        ["node", Path(__file__).with_name("judge_cases.mjs"), js / "judge.mjs", js / "dtypes.mjs"],
        input=json.dumps(cases), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def need_node() -> None:
    import shutil

    if shutil.which("node") is None:
        pytest.skip("there is no node")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _, _ in CASES])
def test_it_says_what_the_judge_says(number: int, said):
    name, truth, got = CASES[number]
    (verdict,) = judge("node", "g", golden_of(name, truth), {"y": got})
    theirs = said[number]
    assert bool(theirs["problems"]) == (verdict.status == "failed"), theirs
    if verdict.worst is not None:
        assert theirs["share"] == pytest.approx(verdict.worst, rel=1e-9)


def test_what_is_unusable_missing_extra_or_without_a_limit_is_said(said):
    unusable, missing, extra, unlimited = said[len(CASES) :]
    assert (unusable["problems"], unusable["notes"]) == ([], ["y is not judged: eager is NaN"])
    assert missing["problems"] == ["y: is missing"]
    assert extra["problems"] == ["z: nobody asked for this output"]
    assert unlimited["problems"] == ["y: the bundle does not say what error is allowed"]
