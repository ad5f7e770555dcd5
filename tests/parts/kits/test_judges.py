"""The judges of the kits in all languages give the verdicts of `attn_export.judge.judge`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conformance import answers, need_tool, python_kit
from msgspec.structs import asdict, replace

from attn_export.judge.judge import judge
from attn_export.measures import Measures
from attn_export.parts.kits.kit import KITS, tolerance_of
from attn_export.results import Case, Golden
from attn_export.rule import largest_tolerance
from attn_export.schema import Tolerance
from attn_export.tensorfile import is_floating, write_tensor

TOLERANCE = Tolerance(whole=1e-3, row=2e-3)
INF, NAN = np.inf, np.nan
INTEGERS = [np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")]
FLOATS = [np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A reference, an engine's output, and the rules for it."""

    name: str
    reference: np.ndarray
    got: np.ndarray
    tolerance: Tolerance | None = TOLERANCE
    uncompared: str | None = None
    ignored_rows: tuple[int, ...] = ()

    def golden(self) -> Golden:
        case = Case(self.name, "shape", {}, {}, "", ignored_rows=self.ignored_rows)
        reference = {"y": self.reference}
        uncompared = {} if self.uncompared is None else {"y": self.uncompared}
        return Golden(case, reference, reference, {"y": self.tolerance}, uncompared)

    def to_json(self) -> dict[str, object]:
        tolerance = self.tolerance and {
            part: error if math.isfinite(error) else str(error)  # JSON has no others
            for part, error in asdict(self.tolerance).items()
        }
        return {
            "expected": {"y": to_json(self.reference)}, "outputs": {"y": to_json(self.got)},
            "allowed": {"y": tolerance}, "unusable": self.golden().uncompared,
            "ignored_rows": self.ignored_rows,
        }  # fmt: skip

    def command(self, path: Path) -> str:
        """Write the arrays, and return the command that judges them in C."""
        files = [f"{path}_{kind}.pb" for kind in ("got", "truth")]
        for file, array in zip(files, (self.got, self.reference), strict=True):
            write_tensor(Path(file), "y", array)
        limits = tolerance_of(
            self.tolerance, self.golden().uncompared.get("y"), self.reference.dtype.name
        )
        tolerance = limits["allowed"]
        errors = [tolerance.whole, tolerance.row] if tolerance else ["-", "-"]
        fields = [*errors, limits["unusable"], limits["beyond_limit"]]
        rows = ",".join(map(str, self.ignored_rows))
        return "\t".join(["judge", *files, *(str(field) or "-" for field in fields), rows or "-"])


def to_json(array: np.ndarray) -> dict[str, object]:
    return {
        "type": array.dtype.name, "dims": list(array.shape),
        "hex": np.ascontiguousarray(array).tobytes().hex(),
    }  # fmt: skip


def arrays() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield a name, a reference and an engine's output."""
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
    for dtype in (np.dtype(bool), *INTEGERS):
        whole = np.arange(6).reshape(2, 3).astype(dtype)
        other = whole.copy()
        other[1, 1] = not other[1, 1] if dtype == np.bool_ else other[1, 1] + 1
        yield f"{dtype} equal", whole, whole
        yield f"{dtype} unequal", whole, other
    for dtype in INTEGERS:
        extremes = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        yield f"{dtype} extremes", extremes, extremes
        yield f"{dtype} wraps around", extremes, extremes + dtype.type(1)
    for dtype in (np.int64, np.uint64):
        large = np.array([2**60 + 1], dtype)
        yield f"{np.dtype(dtype)} beyond float64", large, large - dtype(1)
    yield "a sign of integers", np.array([255], np.uint8), np.array([-1], np.int8)
    yield "empty", np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 3), np.float32)
    yield "another empty shape", np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 4), np.float32)
    yield "another shape", t, t.reshape(3, 5, 4)
    yield "another dtype", t, t.astype(np.float64)
    yield "a scalar", np.float32(2).reshape(()), np.float32(2.1).reshape(())


def limits() -> Iterator[Judged]:
    """Yield tolerances that are evidence, and such that are not."""
    for dtype in FLOATS:
        t, limit = np.ones((2, 3), dtype), largest_tolerance(dtype)
        most = Tolerance(limit.whole, limit.row)
        yield Judged(f"{dtype} at its limit", t, t, most)
        yield Judged(f"{dtype} off at its limit", t, t * dtype.type(2), most)
        for part in ("whole", "row"):
            beyond = replace(most, **{part: getattr(most, part) * 1.01})
            yield Judged(f"{dtype} {part} beyond its limit", t, t, beyond)
            yield Judged(f"{dtype} {part} off beyond its limit", t, t * dtype.type(2), beyond)
    t = np.ones((2, 3), np.float32)
    nowhere = t.copy()
    nowhere[0, 0] = NAN
    for error in (1e9, INF, NAN):
        tolerance = Tolerance(error, error)
        yield Judged(f"{error} allowed", t, t, tolerance)
        yield Judged(f"{error} allowed of nothing", t[:0], t[:0], tolerance)
        yield Judged(f"{error} allowed, of a row", t, t, Tolerance(1e-6, error))
        yield Judged(f"{error} allowed of integers", t.astype(int), t.astype(int), tolerance)
        yield Judged(f"{error} allowed, NaN out of nowhere", t, nowhere, tolerance)
    yield Judged("no tolerance", t, t, None)
    yield Judged("no tolerance of nothing", t[:0], t[:0], None)
    yield Judged("no tolerance of zeros", t * 0, t * 0, None)
    yield Judged("unusable", t, t * 2, TOLERANCE, "eager is NaN")
    yield Judged("unusable without a word", t, t * 2, TOLERANCE, "")
    yield Judged("unusable and no tolerance", t, t, None, "eager is NaN")
    yield Judged("unusable integers", t.astype(int), t.astype(int) * 2, None, "eager is NaN")
    yield Judged("unusable and of another shape", t, t[:1], TOLERANCE, "eager is NaN")


def ignored() -> Iterator[Judged]:
    """Yield rows that are not compared, and others that are."""
    t = np.random.default_rng(1).standard_normal((3, 2, 5)).astype(np.float32)
    t[2] *= 100
    t[0, 1] = 0
    for what in (NAN, INF, -INF, 5.0):
        for row in range(3):
            got = t.copy()
            got[row, 1, 2] = what
            yield Judged(f"{what} in row {row}, row 1 ignored", t, got, ignored_rows=(1,))
            yield Judged(f"{what} in row {row}, 0 and 2 ignored", t, got, ignored_rows=(0, 2))
            yield Judged(f"{what} lost in row {row}, row 1 ignored", got, t, ignored_rows=(1,))
    # The reference of an ignored row counts in the norm of the whole: here it is most of it.
    got = t * np.float32(1.001)
    yield Judged("small beside an ignored row", t, got, Tolerance(1e-4, 2e-3), ignored_rows=(2,))
    yield Judged("large beside an ignored row", t, got, Tolerance(1e-4, 2e-3), ignored_rows=(1,))
    number = np.float32(2).reshape(())
    yield Judged("a scalar has no rows", number, number * np.float32(1.1), ignored_rows=(1,))
    whole = np.arange(6).reshape(3, 2)
    for row in range(3):
        other = whole.copy()
        other[row, 1] += 1
        yield Judged(f"an integer in row {row}", whole, other, None, ignored_rows=(1,))
    yield Judged("ignored and unusable", t, t, TOLERANCE, "eager is NaN", (1,))


CASES = [
    *(Judged(n, t, got, TOLERANCE if is_floating(t.dtype) else None) for n, t, got in arrays()),
    *limits(),
    *ignored(),
]


@pytest.fixture(scope="module")
def said() -> list[dict[str, object]]:
    """Return the JavaScript judge's results on every case, and on cases with other outputs."""
    need_tool("node")
    cases = [case.to_json() for case in CASES]
    cases.append({**cases[0], "outputs": {}})
    cases.append({**cases[0], "outputs": {**cases[0]["outputs"], "z": cases[0]["outputs"]["y"]}})
    js = KITS / "js"
    done = subprocess.run(
        ["node", Path(__file__).with_name("judge_cases.mjs"), js / "judge.mjs", js / "dtypes.mjs"],
        input=json.dumps(cases), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_javascript_says_what_the_judge_says(number: int, said):
    case = CASES[number]
    (verdict,) = judge("node", "g", case.golden(), {"y": case.got})
    theirs = said[number]
    assert theirs["status"] == verdict.status, theirs
    assert bool(theirs["problems"]) == (verdict.status == "failed"), theirs
    assert bool(theirs["unusable"]) == (verdict.status == "unusable"), theirs
    if verdict.worst is not None and math.isfinite(verdict.worst):
        assert theirs["share"] == pytest.approx(verdict.worst, rel=1e-9)


def test_missing_and_unexpected_outputs_and_limits_are_problems(said):
    missing, extra = said[len(CASES) :]
    assert missing["problems"] == ["y: is missing"]
    assert extra["problems"] == ["unexpected output z"]
    by_name = {case.name: theirs for case, theirs in zip(CASES, said, strict=False)}
    assert by_name["unusable"]["unusable"] == ["y: eager is NaN"]
    assert by_name["no tolerance"]["problems"] == ["y: the stored test cases give no tolerance"]
    assert by_name["1000000000.0 allowed"]["unusable"] == [
        "y: the tolerance over the whole output would be 1000000000, and 0.016 is "
        "the most for float32"
    ]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the commands that judge every case in C; conformance.c describes them."""
    folder = tmp_path_factory.mktemp("cases")
    return [case.command(folder / str(number)) for number, case in enumerate(CASES)]


def test_c_gives_the_verdict_of_the_judge(commands: list[str]):
    for case, (status, share, why) in zip(CASES, answers("c", commands), strict=True):
        (verdict,) = judge("c", "g", case.golden(), {"y": case.got})
        assert status == verdict.status, (case.name, why, verdict.message)
        assert bool(why) == (status != "passed"), (case.name, why)
        if verdict.worst is not None and math.isfinite(verdict.worst):
            assert float(share) == pytest.approx(verdict.worst, rel=1e-9), case.name
        if status == "unusable":
            assert why == verdict.message or not verdict.message, case.name


HELD = [
    case for case in CASES if "bfloat16" not in (case.reference.dtype.name, case.got.dtype.name)
]
"""The kit in Python holds no bfloat16."""


@pytest.fixture(scope="module")
def python_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Yield the judge of the kit in Python, with the files that the kit has."""
    with python_kit(tmp_path_factory.mktemp("kit")):
        yield importlib.import_module("attn_kit.rule").judge_array


@pytest.mark.parametrize("case", HELD, ids=[case.name for case in HELD])
def test_python_says_what_the_judge_says(case: Judged, python_judge: Callable):
    (verdict,) = judge("python", "g", case.golden(), {"y": case.got})
    tolerance = case.tolerance and Measures(case.tolerance.whole, case.tolerance.row)
    before = case.got.copy()
    found = python_judge(case.got, case.reference, tolerance, case.uncompared, case.ignored_rows)
    assert (found.status, found.message) == (verdict.status, verdict.message)
    if verdict.worst is not None and math.isfinite(verdict.worst):
        assert found.worst == pytest.approx(verdict.worst, rel=1e-9)
    np.testing.assert_array_equal(case.got, before)  # what an engine gave stays as it is
