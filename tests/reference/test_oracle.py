"""Reference, eager and tolerance, against a slow reference and on tiny modules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import small_spec
from torch import Tensor, nn

from attn_export.cases.draw import add_sums, draw_inputs, generator
from attn_export.export.subject import Subject
from attn_export.judge.judge import judge
from attn_export.measures import measure
from attn_export.reference.oracle import Oracle
from attn_export.results import Arrays, Case
from attn_export.spec import AttentionSpec

EPS = float(np.finfo(np.float32).eps)

SPECS = {
    "gqa_causal_cache_bool_mask": small_spec(),
    "mha_weights_mask_for_all_rows": small_spec(
        num_kv_heads=4, v_head_dim=6, cache="none", attn_mask="bool[L,S]", attn_weights=True
    ),
    "mqa_cross_float_mask": small_spec(
        num_kv_heads=1, cross=True, kdim=24, vdim=20, causal=False, cache="none",
        attn_mask="float[B,H,L,S]",
    ),
    "float_mask_for_all_rows": small_spec(attn_mask="float[H,1,S]", scale=0.5),
    "causal_only": small_spec(attn_mask="none", cache="none", bias=False),
}  # fmt: skip


def case_of(subject: Subject, B: int = 2, L: int = 3, P: int = 2, S: int = 4) -> Case:
    sizes = {"batch": B, "query_len": L, "past_len": P, "key_len": S}
    sizes = add_sums(sizes, subject.sums)
    words = ("oracle", B, L, P, S)
    inputs = draw_inputs(subject.input_descriptions(), sizes, seed_words=words)
    return Case("case", "shape", sizes, inputs, "random inputs")


def slow_reference(
    spec: AttentionSpec, parameters: Arrays, inputs: Arrays
) -> dict[str, np.ndarray]:
    """Compute attention from its definition: one query of one head at a time, in float64."""

    def projected(name: str, x: np.ndarray, heads: int) -> np.ndarray:
        y = x.astype(np.float64) @ parameters[f"{name}.weight"].astype(np.float64).T
        y = y + parameters.get(f"{name}.bias", np.float32(0))
        return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    query = inputs["query"]
    q = projected("q_proj", query, spec.num_heads)
    k = projected("k_proj", inputs.get("key", query), spec.num_kv_heads)
    v = projected("v_proj", inputs.get("value", query), spec.num_kv_heads)
    P = 0
    if spec.has_cache:
        P = inputs["past_key"].shape[2]
        k = np.concatenate([inputs["past_key"], k], axis=2)
        v = np.concatenate([inputs["past_value"], v], axis=2)
    B, H, L, _ = q.shape
    S = k.shape[2]
    mask = np.broadcast_to(inputs.get("attn_mask", np.True_), (B, H, L, S))
    weights, attended = np.zeros((B, H, L, S)), np.zeros((B, H, L, v.shape[3]))
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        g = h // (H // k.shape[1])
        seen = [j for j in range(S) if not (spec.causal and j > P + i)]
        seen = [j for j in seen if mask[b, h, i, j] not in (False, -np.inf)]
        added = {j: 0.0 if mask.dtype == np.bool_ else float(mask[b, h, i, j]) for j in seen}
        score = {j: math.fsum(q[b, h, i] * k[b, g, j]) * spec.softmax_scale for j in seen}
        raised = {j: math.exp(score[j] + added[j]) for j in seen}
        for j in seen:
            weights[b, h, i, j] = raised[j] / math.fsum(raised.values())
            attended[b, h, i] += weights[b, h, i, j] * v[b, g, j]
    merged = attended.transpose(0, 2, 1, 3).reshape(B, L, 1, -1)
    made = {
        "output": projected("out_proj", merged[:, :, 0], 1)[:, 0],
        "present_key": k,
        "present_value": v,
        "attn_weights": weights,
    }
    return {name: made[name] for name in spec.output_shapes()}


@pytest.mark.parametrize("spec_name", SPECS)
def test_the_reference_is_attention_in_float64(spec_name):
    """Compare to less than 1e-7, which float32 anywhere on the way exceeds."""
    spec, subject = SPECS[spec_name], Subject.from_spec(SPECS[spec_name])
    case = case_of(subject)
    parameters = {name: tensor.numpy() for name, tensor in subject.module.state_dict().items()}
    reference = Oracle(subject).reference(case.inputs)
    for name, wanted in slow_reference(spec, parameters, case.inputs).items():
        assert reference[name].dtype == np.float64
        np.testing.assert_allclose(reference[name], wanted, rtol=1e-12, atol=1e-14)


class Function(nn.Module):
    """A module of one input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def golden_of(function: Callable[[Tensor], Tensor], x: np.ndarray):
    subject = Subject(Function(function).eval(), {"x": torch.from_numpy(x)}, {}, ["y"])
    return Oracle(subject).golden(Case("tiny", "shape", {}, {"x": x}, ""))


def attend_to_itself(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def test_the_reference_keeps_nan_where_a_fused_kernel_might_not():
    x = generator("nan").standard_normal((1, 1, 4, 8)).astype(np.float32)
    x[0, 0, 1, 2] = np.nan
    golden = golden_of(attend_to_itself, x)
    assert np.isnan(golden.expected["y"]).all()  # every query sees the NaN key


def test_the_oracle_leaves_the_module_and_the_inputs_as_they_were():
    subject = Subject.from_spec(small_spec())
    case = case_of(subject)
    before = {name: array.copy() for name, array in case.inputs.items()}
    Oracle(subject).golden(case)
    assert {p.dtype for p in subject.module.parameters()} == {torch.float32}
    assert all(np.array_equal(before[name], array) for name, array in case.inputs.items())


def test_the_oracle_gives_back_the_threads_that_it_took():
    subject = Subject.from_spec(small_spec())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # a module as small as this one gets 1
        Oracle(subject).golden(case_of(subject))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_golden_holds_the_rounded_reference_and_what_the_module_gives():
    subject = Subject.from_spec(small_spec())
    case, oracle = case_of(subject), Oracle(subject)
    golden, reference = oracle.golden(case), oracle.reference(case.inputs)
    tensors = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    with torch.no_grad():
        eager = dict(zip(subject.outputs, subject.module(**tensors), strict=True))
    for name, array in golden.expected.items():
        assert array.dtype == np.float32
        # Runs that share a batch are summed in another order: the last bit may differ.
        np.testing.assert_allclose(array, reference[name].astype(np.float32), rtol=EPS)
        assert np.array_equal(golden.eager[name], eager[name].numpy())


def test_the_same_case_gives_the_same_golden_twice():
    subject = Subject.from_spec(small_spec())
    one, other = (Oracle(subject).golden(case_of(subject)) for _ in range(2))
    assert one.tolerance == other.tolerance
    assert all(np.array_equal(one.expected[n], other.expected[n]) for n in one.expected)


X = 1 + 2.0**-12 * generator("x").standard_normal((3, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("function", "least", "most"),
    [
        pytest.param(torch.sign, 2 * EPS, 2 * EPS, id="exact: the floor"),
        pytest.param(lambda x: x - 1, 2 * EPS, 2 * EPS, id="an exact difference: the floor"),
        # 4096 of the rounded product cancel; a rounding error is 0.29 eps on average.
        pytest.param(lambda x: x * 1.5 - 1.5, 4096 * EPS, 4 * 4096 * EPS, id="cancelled digits"),
        pytest.param(lambda x: x + 1e2 - 1e2, 60 * EPS, 300 * EPS, id="rounding within"),
    ],
)
def test_the_tolerance_is_what_rounding_explains(function, least, most):
    tolerance = golden_of(function, X).tolerance["y"]
    assert least <= tolerance.whole <= most
    assert tolerance.whole <= tolerance.row <= 4 * most


def test_a_module_that_computes_in_few_bits_is_allowed_4_times_its_own_error():
    def half(x: Tensor) -> Tensor:
        return (x.half() * x.half()).float()

    golden = golden_of(half, X)
    own = measure(golden.eager["y"], golden.expected["y"])
    assert own.whole > 1e-5
    assert golden.tolerance["y"].whole == pytest.approx(4 * own.whole, rel=1e-3)
    assert golden.tolerance["y"].row == pytest.approx(4 * own.row, rel=1e-3)


def foreign(subject: Subject) -> Subject:
    """Return the same module as a user's, without a spec."""
    return Subject(
        subject.module, subject.inputs, subject.axes, subject.outputs, relations=subject.relations
    )


@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("sizes", [{"B": 1, "L": 1, "P": 0}, {"B": 3, "L": 4, "P": 5}], ids=str)
def test_runs_in_one_batch_give_what_they_give_one_by_one(spec_name, sizes):
    subject = Subject.from_spec(SPECS[spec_name])
    case = case_of(subject, **sizes)
    one, other = (Oracle(s).golden(case) for s in (subject, foreign(subject)))
    for name, array in one.expected.items():
        np.testing.assert_array_equal(array, other.expected[name])
        for measured in ("whole", "row"):
            ratio = getattr(one.tolerance[name], measured) / getattr(
                other.tolerance[name], measured
            )
            assert 1 / 3 < ratio < 3


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (100 * x).exp() / (100 * x).exp(), id="NaN"),
        pytest.param(lambda x: (100 * x).exp() * (-100 * x).exp(), id="infinity"),
    ],
)
def test_a_case_with_only_eager_not_finite_is_not_compared(function):
    golden = golden_of(function, X)
    assert np.isfinite(golden.expected["y"]).all()
    assert "gives NaN or Inf" in golden.uncompared["y"]
    (verdict,) = judge("r", "g", golden, {"y": golden.expected["y"]})
    assert verdict.status == "unusable"


@pytest.mark.parametrize("cache", ["none", "append", "in-place"])
@pytest.mark.parametrize("mask", ["none", "bool[B,1,1,S]", "float[B,H,L,S]"])
def test_scores_beyond_float16_are_scaled_down(cache: str, mask: str):
    def usable(factor: float) -> Case:
        spec = small_spec(cache=cache, attn_mask=mask, dtype="float16")
        subject = Subject.from_spec(spec)
        case = case_of(subject)
        case.inputs["query"][:] *= np.float16(factor)
        golden = Oracle(subject).usable(case)
        assert not golden.uncompared
        return golden.case

    assert "inputs times" not in usable(100).about
    assert "inputs times" in usable(2000).about


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(lambda x: x.argmax(dim=-1), np.int64), (lambda x: x > 1, np.bool_)],
    ids=["int64", "bool"],
)
def test_outputs_without_rounding_have_no_tolerance(function, dtype):
    golden = golden_of(function, X)
    assert golden.expected["y"].dtype == dtype
    assert (golden.tolerance["y"], dict(golden.uncompared)) == (None, {})


def test_a_reference_beyond_the_range_of_the_output_is_not_compared():
    golden = golden_of(lambda x: (100 * x).exp(), np.ones((2, 3), np.float32))
    assert "gives NaN or Inf" in golden.uncompared["y"]


def test_a_case_in_which_rounding_changes_everything_is_not_compared():
    x = 1 + np.arange(6, dtype=np.float32).reshape(2, 3) * 2.0**-22
    golden = golden_of(lambda x: ((x + 1e4) - 1e4) - 1, x)
    assert "0.016 is the most for float32" in golden.uncompared["y"]


def test_a_row_of_one_element_that_vanishes_gets_inputs_of_other_signs():
    spec = small_spec(v_head_dim=1, num_heads=1, num_kv_heads=1, embed_dim=2, bias=False)
    subject = Subject.from_spec(spec)
    case = case_of(subject)
    weight = subject.module.get_parameter("v_proj.weight").detach().numpy()[0]
    query = case.inputs["query"].copy()
    query[0, 0] = [weight[1], -weight[0] * np.float32(1 + 2**-21)]
    case = dataclasses.replace(case, inputs={**case.inputs, "query": query})
    oracle = Oracle(subject)
    assert oracle.golden(case).uncompared
    usable = oracle.usable(case)
    assert not usable.uncompared
    assert usable.case.about == case.about
    for name, array in usable.case.inputs.items():
        assert np.array_equal(np.abs(array), np.abs(case.inputs[name]))


def test_the_tolerance_for_short_rows_depends_on_no_other_case():
    # Their worst error is that of the row that nearly vanishes.
    subject = Subject.from_spec(small_spec(embed_dim=64, num_kv_heads=1, head_dim=1))
    near, case = case_of(subject, 3, 63, 0), case_of(subject, 3, 64, 0)
    alone, after = Oracle(subject), Oracle(subject)
    after.golden(near)
    expected = alone.golden(case).tolerance
    assert after.golden(case).tolerance == expected
