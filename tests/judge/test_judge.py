"""The rule by which a runtime passes, on outputs written by hand."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_golden import TOLERANCE, made_golden

from attn_export.judge.judge import judge
from attn_export.results import Golden, Verdict
from attn_export.runtimes.run_options import Gate
from attn_export.schema import Tolerance

NAN, INF = np.nan, np.inf
F32, F64, I64 = np.float32, np.float64, np.int64


def judge_one(golden: Golden, got: np.ndarray, gate: Gate | None = None) -> Verdict:
    (verdict,) = judge("runtime", "model.onnx", golden, {"y": got}, gate)
    return verdict


def judge_values(reference: object, got: object, dtype: type = F32, gate: Gate | None = None):
    return judge_one(made_golden({"y": np.array(reference, dtype)}), np.array(got, dtype), gate)


def test_a_verdict_says_who_ran_what():
    verdict = judge_values([[1, 2]], [[1, 2]])
    assert (verdict.runtime, verdict.graph, verdict.case, verdict.output) == (
        "runtime", "model.onnx", "base", "y",
    )  # fmt: skip
    assert (verdict.status, verdict.message) == ("passed", "")


@pytest.mark.parametrize(
    ("reference", "got", "status"),
    [
        pytest.param([[3, 4]], [[3, 4]], "passed", id="equal"),
        pytest.param([[3, 4]], [[3, 4.004]], "passed", id="within the whole"),
        pytest.param([[3, 4]], [[3, 4.006]], "failed", id="outside the whole"),
        pytest.param([[300, 400], [1, 0]], [[300, 400], [1.009, 0]], "passed", id="within a row"),
        pytest.param([[300, 400], [1, 0]], [[300, 400], [1.011, 0]], "failed", id="outside a row"),
        pytest.param([[3, 4], [0, 0]], [[3, 4], [0, 0]], "passed", id="a row of 0 is 0"),
        pytest.param([[3, 4], [0, 0]], [[3, 4], [-0.0, 0]], "passed", id="minus 0 is 0"),
        pytest.param([[3, 4], [0, 0]], [[3, 4], [0, 1e-30]], "failed", id="a row of 0 is nearly 0"),
        pytest.param([[0, 0]], [[0, 0]], "passed", id="all zero and right"),
        pytest.param([[0, 0]], [[0, 1e-30]], "failed", id="all zero and not right"),
        pytest.param([[0, 4]], [[1e-5, 4]], "passed", id="a 0 within a row may be off"),
        pytest.param(np.zeros((2, 0)), np.zeros((2, 0)), "passed", id="empty rows"),
        pytest.param(np.zeros((0, 2)), np.zeros((0, 2)), "passed", id="no rows"),
        pytest.param(np.zeros((0, 2)), np.zeros((0, 3)), "failed", id="empty, of another shape"),
        pytest.param(3.0, 3.0, "passed", id="a number without axes"),
        pytest.param(3.0, 3.1, "failed", id="a number without axes, wrong"),
        pytest.param(0.0, 1e-30, "failed", id="a 0 without axes"),
        pytest.param([[3, NAN]], [[3, NAN]], "passed", id="NaN where the reference has it"),
        pytest.param([[3, 4]], [[3, NAN]], "failed", id="NaN where the reference is finite"),
        pytest.param([[3, NAN]], [[3, 4]], "failed", id="finite where the reference is NaN"),
        pytest.param([[3, INF]], [[3, INF]], "passed", id="infinity where the reference has it"),
        pytest.param([[3, INF]], [[3, -INF]], "failed", id="infinity of the other sign"),
        pytest.param([[3, INF]], [[3, NAN]], "failed", id="NaN where the reference is infinite"),
        pytest.param([[3, 4]], [[3, -INF]], "failed", id="infinity where the reference is finite"),
        pytest.param([[3, INF]], [[4, INF]], "failed", id="the finite rest is measured"),
        pytest.param([[0, 0], [INF, 1]], [[1, 0], [INF, 1]], "failed", id="0 beside infinity"),
    ],
)
def test_floating_outputs(reference, got, status):
    verdict = judge_values(reference, got)
    assert verdict.status == status
    assert bool(verdict.message) == (status == "failed")


@pytest.mark.parametrize(
    ("dtype", "got", "status"),
    [
        pytest.param(I64, [[1, 2]], "passed", id="equal integers"),
        pytest.param(I64, [[1, 3]], "failed", id="an integer off by one"),
        pytest.param(np.bool_, [[1, 1]], "passed", id="equal bools"),
        pytest.param(np.bool_, [[1, 0]], "failed", id="another bool"),
    ],
)
def test_integer_and_bool_outputs_have_to_be_equal(dtype, got, status):
    assert judge_values([[1, 2]], got, dtype).status == status


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (np.ones((2, 3), F64), "dtype is float64, expected float32"),
        (np.ones((2, 3), ml_dtypes.bfloat16), "dtype is bfloat16, expected float32"),
        (np.ones((2, 3), np.int32), "dtype is int32, expected float32"),
        (np.ones((3, 2), F32), "shape is [3, 2], expected [2, 3]"),
        (np.ones((1, 2, 3), F32), "shape is [1, 2, 3], expected [2, 3]"),
        (np.ones((1, 3), F32), "shape is [1, 3], expected [2, 3]"),
    ],
)
def test_dtype_and_shape_are_exact(got, message):
    verdict = judge_one(made_golden({"y": np.ones((2, 3), F32)}), got)
    assert (verdict.status, verdict.message) == ("failed", message)


def test_a_missing_and_an_unasked_output_fail_by_name_and_the_rest_is_judged():
    one = np.ones((1, 2), F32)
    verdicts = judge("r", "g", made_golden({"y": one, "z": one}), {"z": one, "x": one})
    assert [(v.output, v.status, v.message) for v in verdicts] == [
        ("y", "failed", "the output y is missing"),
        ("z", "passed", ""),
        ("x", "failed", "unexpected output x"),
    ]


def test_the_order_of_outputs_does_not_matter():
    y, z = np.ones((1, 2), F32), np.zeros((1, 3), F32)
    verdicts = judge("r", "g", made_golden({"y": y, "z": z}), {"z": z, "y": y})
    assert {v.status for v in verdicts} == {"passed"}


@pytest.mark.parametrize(
    ("reference", "got", "parts"),
    [
        pytest.param(
            [[1, 2], [3, 4]], [[1, 2], [3, 4.5]],
            ["relative error", "over the whole output", "tolerance 1.00e-03",
             "worst at [1, 1]", "actual 4.5", "expected 4"],
            id="the whole",
        ),
        pytest.param(
            [[300, 400], [0, 1]], [[300, 400], [0, 1.25]],
            ["relative error 2.50e-01", "over one row", "tolerance 1.00e-02", "worst at [1, 1]",
             "actual 1.25", "expected 1"],
            id="a row",
        ),
        pytest.param(
            [[1, 2], [0, 0]], [[1, 2], [0, 0.5]],
            ["must be 0", "1 of 4 elements", "the first at [1, 1]", "actual 0.5", "expected 0"],
            id="a row of 0",
        ),
        pytest.param(
            [[1, 2]], [[1, NAN]], ["NaN", "1 of 2 elements", "[0, 1]", "actual nan", "expected 2"],
            id="NaN",
        ),
        pytest.param([[1, 2]], [[INF, INF]], ["+Inf", "2 of 2 elements", "[0, 0]"], id="infinity"),
        pytest.param([[1, -INF]], [[1, 2]], ["-Inf", "[0, 1]", "expected -inf"], id="no infinity"),
    ],
)  # fmt: skip
def test_the_message_says_where_what_and_how_much_is_allowed(reference, got, parts):
    message = judge_values(reference, got).message
    assert [part for part in parts if part not in message] == []


def test_the_message_of_integers_says_where_and_what():
    message = judge_values([[1, 2], [3, 4]], [[1, 2], [7, 7]], I64).message
    assert message == "2 of 4 elements, the first at [1, 0]: actual 7, expected 3"


@pytest.mark.parametrize(("got", "status"), [(F32, "unusable"), (F64, "failed")])
def test_what_is_not_compared_is_never_a_pass_and_hides_no_wrong_type(got, status):
    """Judge a case whose eager is NaN and whose reference is not, so that no figure is right."""
    golden = made_golden(
        {"y": np.ones((1, 2), F32)},
        {"y": np.array([[1, NAN]], F32)},
        tolerance=None,
        uncompared={"y": "eager is NaN"},
    )
    verdict = judge_one(golden, np.ones((1, 2), got))
    assert verdict.status == status
    assert status == "failed" or verdict.message == "eager is NaN"


@pytest.mark.parametrize(
    ("gate", "got", "status"),
    [
        pytest.param(Gate(), 10.002, "passed", id="no gate"),
        pytest.param(Gate(atol=0.003), 10.002, "passed", id="within atol"),
        pytest.param(Gate(atol=0.001), 10.002, "failed", id="outside atol"),
        pytest.param(Gate(rtol=0.0003), 10.002, "passed", id="within rtol"),
        pytest.param(Gate(rtol=0.0001), 10.002, "failed", id="outside rtol"),
        pytest.param(Gate(atol=0.001, rtol=0.00015), 10.002, "passed", id="both add up"),
        pytest.param(Gate(atol=0, rtol=0), 10.002, "failed", id="0 is a gate"),
        pytest.param(Gate(atol=0, rtol=0), 10.0, "passed", id="equal passes a gate of 0"),
        pytest.param(Gate(atol=100, rtol=100), 10.2, "failed", id="a wide gate lets nothing in"),
    ],
)
def test_a_gate_of_the_users_only_tightens(gate, got, status):
    assert judge_values([[10.0, 10.0]], [[10.0, got]], gate=gate).status == status


def test_a_gate_compares_with_eager_and_says_so():
    reference, eager = np.array([[10, 10]], F32), np.array([[10, 10.002]], F32)
    golden = made_golden({"y": reference}, {"y": eager})
    assert judge_one(golden, eager, Gate(atol=0)).status == "passed"
    verdict = judge_one(golden, reference, Gate(atol=1e-4))
    assert verdict.status == "failed"
    for part in ("--atol 0.0001 --rtol 0", "eager", "[0, 1]", "actual 10", "expected 10.002"):
        assert part in verdict.message


def test_a_failed_rule_is_named_beside_a_gate_too():
    verdict = judge_values([[1, 2]], [[1, 3]], gate=Gate(atol=0))
    assert verdict.message == judge_values([[1, 2]], [[1, 3]]).message


def test_a_gate_passes_infinities_where_they_belong():
    assert judge_values([[1, INF]], [[1, INF]], gate=Gate(atol=0)).status == "passed"


def test_differences_are_from_eager_and_measures_from_the_reference():
    golden = made_golden({"y": np.array([[4, 0]], F64)}, {"y": np.array([[8, 0.5]], F64)})
    verdict = judge_one(golden, np.array([[5, 0]], F64))
    assert (verdict.whole, verdict.row) == (0.25, 0.25)
    assert verdict.worst == pytest.approx(0.25 / TOLERANCE.whole)
    assert (verdict.max_abs, verdict.max_rel) == (3, 1)


@pytest.mark.parametrize(
    ("reference", "got", "figure"),
    [
        ([[1, 2]], [[1, NAN]], NAN),
        ([[1, NAN]], [[1, 2]], NAN),
        ([[NAN, 2]], [[INF, NAN]], NAN),
        ([[1, 2]], [[1, INF]], INF),
        ([[0, 0]], [[0, 1e-9]], INF),
    ],
)
def test_a_wrong_kind_has_no_finite_figure(reference, got, figure):
    verdict = judge_values(reference, got)
    assert verdict.status == "failed"
    assert verdict.worst == pytest.approx(figure, nan_ok=True)


@pytest.mark.parametrize("figure", [NAN, INF])
def test_the_difference_from_eager_of_what_is_not_finite_is_not_finite(figure: float):
    verdict = judge_values([[1, 2]], [[1, figure]])
    assert (verdict.max_abs, verdict.max_rel) == pytest.approx((figure, figure), nan_ok=True)
    golden = made_golden({"y": np.array([[1, NAN]], F64)})
    assert judge_one(golden, np.array([[1, NAN]], F64)).max_abs == 0


def test_integers_that_differ_have_no_figure():
    verdict = judge_one(made_golden({"y": np.array([1, 2])}), np.array([1, 3]))
    assert (verdict.status, verdict.worst, verdict.max_abs) == ("failed", None, None)


@settings(deadline=None, max_examples=80)
@given(
    size=st.floats(1e-30, 1e30),
    error=st.floats(0, 1),
    whole=st.floats(1e-6, 1.9e-3),
    row=st.floats(1e-6, 0.12),
)
def test_an_output_passes_exactly_when_both_measures_are_within(size, error, whole, row):
    """Change every element by the same factor, which both measures are then."""
    assume(min(abs(error - whole), abs(error - row)) > 1e-9)
    golden = made_golden({"y": np.full((2, 3), size, F64)}, tolerance=Tolerance(whole, row))
    verdict = judge_one(golden, golden.expected["y"] * (1 + error))
    assert (verdict.status == "passed") == (error < min(whole, row))
    # 1 + error is rounded, by 1e-16: that much, relative to an allowed 1e-6.
    assert verdict.worst == pytest.approx(error / min(whole, row), rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=80)
@given(
    got=st.lists(st.floats(width=32), min_size=4, max_size=4),
    atol=st.none() | st.floats(0, 1e6),
    rtol=st.none() | st.floats(0, 1e6),
)
def test_no_gate_turns_a_failure_into_a_pass(got, atol, rtol):
    golden = made_golden({"y": np.array([[1, -2], [0, 0]], F32)})
    array = np.array(got, F32).reshape(2, 2)
    if judge_one(golden, array).status == "failed":
        assert judge_one(golden, array, Gate(atol, rtol)).status == "failed"


@pytest.mark.parametrize(
    ("reference", "got"),
    [([[np.inf, 0.0]], [[np.inf, 7.0]]), ([[np.nan, 0.0]], [[np.nan, 1e-30]])],
)
def test_the_zeros_of_a_row_that_is_not_finite_have_to_be_zeros_too(reference, got):
    assert judge_values(reference, reference).status == "passed"
    assert judge_values(reference, got).status == "failed"


@pytest.mark.parametrize("size", [1e200, 1e-170])
def test_float64_values_whose_squares_leave_its_range_are_still_compared(size):
    reference = np.full((2, 3), size)
    assert judge_values(reference, reference * (1 + 1e-6), np.float64).status == "passed"
    assert judge_values(reference, reference * 50, np.float64).status == "failed"


@pytest.mark.parametrize(
    ("dialect", "error", "status"),
    [
        pytest.param("standard", 1 / 64, "failed", id="computes in float32, whatever its name"),
        pytest.param("ort", 1 / 64, "failed", id="computes in float32, too"),
        pytest.param("cuda", 1 / 64, "passed", id="computes in bfloat16"),
        pytest.param("cuda", 1 / 32, "passed", id="within four times eager's error"),
        pytest.param("cuda", 1 / 16, "failed", id="beyond four times eager's error"),
    ],
)
def test_graphs_that_compute_in_bfloat16_may_be_as_wrong_as_eager(dialect, error, status):
    reference = np.ones((2, 4), ml_dtypes.bfloat16)
    eager = reference + np.array(1 / 128, reference.dtype)
    golden = dataclasses.replace(
        made_golden({"y": reference}, {"y": eager}), tolerance={"y": TOLERANCE}
    )
    got = reference + np.array(error, reference.dtype)
    (verdict,) = judge("ort-cuda", "model.cuda.onnx", golden, {"y": got}, dialect=dialect)
    assert (verdict.status, verdict.whole) == (status, error)


def test_only_graphs_in_bfloat16_may_be_as_wrong_as_eager():
    reference = np.ones((2, 4), np.float16)
    golden = made_golden({"y": reference}, {"y": reference * np.float16(1.01)})
    got = golden.eager["y"]
    (verdict,) = judge("ort-cuda", "model.cuda.onnx", golden, {"y": got}, dialect="cuda")
    assert verdict.status == "failed"
