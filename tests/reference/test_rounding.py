"""Random rounding is as large as that of float32 sums taken term by term, and no larger."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_export import Subject
from attn_export.cases.draw import generator
from attn_export.judge.judge import judge
from attn_export.measures import measure
from attn_export.reference.decisions import Decisions
from attn_export.reference.operations import RoundingRecorder
from attn_export.reference.oracle import Oracle
from attn_export.reference.rounding import RandomRounding
from attn_export.reference.tolerance import run_count
from attn_export.results import Case

EPS = float(np.finfo(np.float32).eps)
F32 = np.float32


def drawn(*shape: int) -> np.ndarray:
    return generator("rounding", *shape).standard_normal(shape).astype(F32)


def spread(function, *arrays: np.ndarray, eps: float = EPS, sums: float = EPS) -> float:
    """Return the RMS change by rounding, over 16 runs, relative to the result."""
    tensors = [torch.from_numpy(array.astype(np.float64)) for array in arrays]
    right = function(*tensors)
    found = []
    for seed in range(16):
        with RandomRounding(eps, sums, seed):
            found.append(float((function(*tensors) - right).square().mean()))
    return float(np.sqrt(np.mean(found)) / right.square().mean().sqrt())


def sequential(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply two matrices in float32, one term after the other."""
    total = np.zeros((a.shape[0], b.shape[1]), F32)
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[None, k]
    return total


@pytest.mark.parametrize("terms", [1, 8, 64, 512, 2048])
@pytest.mark.parametrize("sign", ["any", "one"])
def test_a_product_rounds_as_sums_taken_term_by_term_do(terms, sign):
    a, b = drawn(64, terms), drawn(terms, 64)
    if sign == "one":
        a, b = np.abs(a), np.abs(b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.sqrt(np.square(sequential(a, b) - exact).mean() / np.square(exact).mean())
    modelled = spread(torch.matmul, a, b)
    assert 0.8 < modelled / error < 3.5


def test_terms_added_to_a_large_one_round_as_often():
    a, b = drawn(64, 256), drawn(256, 64)
    a[:, 0] *= 1e4
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.sqrt(np.square(sequential(a, b) - exact).mean() / np.square(exact).mean())
    assert 0.8 < spread(torch.matmul, a, b) / error < 3.5


@pytest.mark.parametrize("size", [1e-60, 1.0, 1e60])
def test_a_product_with_a_large_weight_rounds_as_its_halves_do(size):
    x, weight = drawn(4, 2100), drawn(2100, 2100).astype(float) * size  # squares beyond float32

    def halves(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([x @ half for half in weight.chunk(2, 1)], 1)

    assert spread(torch.matmul, x, weight) == pytest.approx(spread(halves, x, weight), rel=0.02)


def test_squares_of_a_weight_that_changes_are_taken_anew():
    x, weight = (torch.from_numpy(drawn(*shape)).double() for shape in ((1, 2100), (2100, 2100)))

    def error() -> float:
        exact = x @ weight
        with RandomRounding(EPS, EPS, 0):
            return float((x @ weight - exact).norm() / weight.norm())

    before = error()
    weight.mul_(1000.0)
    assert error() == pytest.approx(before, rel=1e-3)


def test_a_sum_with_a_mask_of_bools_rounds_as_any_sum():
    x = np.abs(drawn(64, 64))
    error = spread(lambda x: x + (x > 1), x)
    assert 0.5 < error / spread(lambda x: x + (x > 1).to(x), x) < 2


def one_pass_layer_norm(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the layer norm of rows in float32, with the variance as runtimes take it."""
    mean = x.mean(-1, keepdims=True, dtype=F32)
    variance = np.square(x).mean(-1, keepdims=True, dtype=F32) - np.square(mean)
    return (x - mean) / np.sqrt(variance + F32(1e-6)) + bias


@pytest.mark.parametrize("mean", [0, 10, 100])
@pytest.mark.parametrize("bias", [0, -1])
@pytest.mark.parametrize("groups", [False, True])
def test_a_norm_rounds_as_runtimes_do(mean, bias, groups):
    """Check rows of two, which are 1 and -1 before a bias is added."""
    x = (1 + np.abs(drawn(256, 1))) * np.array([1, -1], F32) + F32(mean)
    biases = np.full(2, bias, F32)

    def norm(x: Tensor, bias: Tensor) -> Tensor:
        if groups:
            return nn.functional.group_norm(x, 1, torch.ones(2).double(), bias, 1e-6)
        return nn.functional.layer_norm(x, (2,), torch.ones(2).double(), bias, 1e-6)

    exact = norm(torch.from_numpy(x).double(), torch.from_numpy(biases).double()).numpy()
    error = np.sqrt(np.square(one_pass_layer_norm(x, biases) - exact).mean())
    modelled = spread(norm, x, biases) * np.sqrt(np.square(exact).mean())
    assert 0.8 < modelled / error < 20


def test_the_mean_square_of_a_norm_adds_up_its_terms():
    x = drawn(64, 1024) + F32(30)
    exact = nn.functional.layer_norm(torch.from_numpy(x).double(), (1024,)).numpy()
    mean, square = (np.cumsum(t, -1, dtype=F32)[:, -1:] / F32(1024) for t in (x, np.square(x)))
    computed = (x - mean) / np.sqrt(square - np.square(mean) + F32(1e-5))
    error = np.sqrt(np.square(computed - exact).mean())
    modelled = spread(lambda x: nn.functional.layer_norm(x, (1024,)), x)
    assert 0.5 < modelled / error < 3.5


def test_one_hot_rows_round_once():
    a = np.eye(16, 512, dtype=F32)
    assert spread(torch.matmul, a, drawn(512, 32)) < 0.8 * EPS


@pytest.mark.parametrize(
    ("function", "least", "most"),
    [
        pytest.param(lambda x: x * 1.5, 0.2, 0.4, id="a single operation"),
        pytest.param(lambda x: x.transpose(0, 1).reshape(-1), 0, 0, id="moves"),
        pytest.param(lambda x: x.clamp(min=0).argmax(0).double(), 0, 0, id="choices"),
        pytest.param(lambda x: x - 1e30, 0, 0, id="what is absorbed"),
        pytest.param(lambda x: x.clone().mul_(1.5), 0.2, 0.4, id="in place"),
        pytest.param(lambda x: nn.functional.layer_norm(x, (64,)), 0.3, 3, id="a norm"),
        pytest.param(lambda x: x.exp().sum(-1), 0.5, 8, id="a sum"),
        pytest.param(lambda x: x.square().mean(-1), 0.5, 8, id="a mean"),
        pytest.param(lambda x: x.softmax(-1), 0.5, 5, id="a softmax"),
        pytest.param(
            lambda x: nn.functional.conv1d(x[None], torch.ones(3, 32, 3).double()), 1, 20,
            id="a convolution",
        ),
    ],
)  # fmt: skip
def test_each_kind_of_operation_rounds(function, least, most):
    found = spread(function, drawn(32, 64)) / EPS
    assert least <= found <= most


def added(x: Tensor, mask: Tensor) -> Tensor:
    return x.clone().add_(mask)


def added_in_a_product(x: Tensor, mask: Tensor) -> Tensor:
    return torch.baddbmm(mask.expand(1, 2, 2), x[None], torch.eye(2).double()[None])[0]


@pytest.mark.parametrize("add", [added, added_in_a_product], ids=lambda add: add.__name__)
def test_hidden_keys_stay_hidden_and_nan_stays_where_it_is(add):
    def hide(x: Tensor) -> Tensor:
        return add(x, torch.tensor([0.0, -torch.inf]).double()).softmax(-1)

    x = torch.from_numpy(np.array([[1.0, 2.0], [np.nan, 1.0]]))
    with RandomRounding(EPS, EPS, 1):
        found = hide(x)
    assert found[0].tolist() == pytest.approx([1, 0], abs=1e-6)
    assert found[1].isnan().all()


LOWEST = {name: torch.finfo(getattr(torch, name)).min for name in ("float32", "float64")}
"""A float64 copy of a module asks for the lowest number of float64."""


def lowest_times_hidden(x: Tensor, mask: Tensor) -> Tensor:
    return x + mask.sign().abs() * mask.amin()


@pytest.mark.parametrize("add", [added, added_in_a_product, lowest_times_hidden])
@pytest.mark.parametrize("lowest", LOWEST.values(), ids=LOWEST)
def test_keys_with_the_lowest_score_round_to_the_same_weights(add, lowest):
    x = torch.from_numpy(drawn(2, 2)).double()
    for hidden, weights in ([0.0, lowest], [1, 0]), ([lowest, lowest], [0.5, 0.5]):
        for seed in range(8):
            with RandomRounding(EPS, EPS, seed):
                found = add(x, torch.tensor(hidden, dtype=x.dtype)).softmax(-1)
            assert found == pytest.approx(np.array([weights] * 2), abs=1e-6)


def test_runs_in_one_batch_round_differently():
    a, b = (torch.from_numpy(drawn(4, 8)).double() for _ in range(2))
    with RandomRounding(EPS, EPS, 0, copies=3):
        found = torch.cat([a] * 3) @ b.T
    one, two, three = found.chunk(3)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert torch.allclose(one, three, rtol=100 * EPS)


def test_a_module_of_mixed_types_rounds_in_each_of_them():
    """Check a norm in float32 between products in float16."""

    def mixed(x: Tensor) -> Tensor:
        wide = (x * 2).float() if x.dtype == torch.half else x * 2
        return wide.exp() - wide.exp() * 0.5

    with RoundingRecorder() as recorder:
        mixed(torch.ones(3).half())
    steps = recorder.steps
    half, single = (float(torch.finfo(kind).eps) for kind in (torch.half, torch.float))
    assert steps == [("mul", half), *[("exp", single)] * 2, ("mul", single), ("sub", single)]
    x = torch.from_numpy(drawn(1, 64)).double()
    right = mixed(x)

    def error(steps) -> float:
        with RandomRounding(half, single, 0, steps=steps):
            return float(((mixed(x) - right) / right).abs().max())

    only_first = [(name, eps if name == "mul" else 0.0) for name, eps in steps]
    assert error(only_first) < error(()) < 20 * half


def test_the_same_seed_rounds_alike():
    x = torch.from_numpy(drawn(8, 8)).double()

    def run(seed: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), RandomRounding(EPS, EPS, seed):
            return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_whole_numbers_are_counted_exactly():
    mask = torch.ones(2, 7, dtype=torch.float64)
    with RandomRounding(EPS, EPS, 0):
        positions = (mask.cumsum(-1) * mask - 1).long()
    assert positions.tolist() == [list(range(7))] * 2


@pytest.mark.parametrize(
    ("shape", "dtype", "contents", "count"),
    [
        ((2, 30, 32), "float32", (), 8), ((2, 100, 32), "float32", (), 4),
        ((2, 300, 32), "float32", (), 2), ((2, 600, 32), "float32", (), 1),
        # one row may have most of the error
        ((2, 600, 1), "float32", (), 16), ((2, 600, 1), "int8", (), 1),
        ((2, 100, 32), "float32", ("left_padding", "sharp"), 16),
        ((2, 600, 32), "float32", ("left_padding", "sharp"), 1),
    ],
)  # fmt: skip
def test_many_rows_are_measured_once_unless_one_may_decide(
    shape: tuple[int, ...], dtype: str, contents: tuple[str, ...], count: int
):
    assert run_count({"output": np.zeros(shape, dtype)}, contents)[1] == count


class OneLargeRow(nn.Module):
    """Attention whose first query scores two of the keys equally, and very high."""

    def forward(self, query: Tensor) -> Tensor:
        keys = torch.linspace(-1, 1, 48, dtype=query.dtype).sin().view(6, 8)
        keys[:2, 0] = 3
        return (query @ keys.mT).softmax(-1) @ keys.roll(3, 1)


def test_one_row_with_most_of_the_error_raises_no_false_alarm():
    query = drawn(100, 8)
    query[0] = [1e4, *[0] * 7]
    module = OneLargeRow().eval()
    oracle = Oracle(
        Subject(module, {"query": torch.from_numpy(query)}, {"query": {0: "rows"}}, ["y"])
    )
    inputs = {"query": query}
    limits = []
    for number in range(100):  # the name seeds the runs that decide what is allowed
        case = Case(f"case {number}", "shape", {}, inputs, "", contents=("sharp",))
        tolerance = oracle.golden(case).tolerance["y"]
        assert tolerance is not None
        limits.append(tolerance.row)
    reference, errors = oracle.reference(inputs)["y"], []
    for seed in range(1000):
        with RandomRounding(EPS, EPS, seed):
            right = module(torch.from_numpy(query).double())
        errors.append(measure(right.numpy(), reference).row)
    others = measure(np.delete(right.numpy(), 0, 0), np.delete(reference, 0, 0)).row
    assert others < 0.05 * np.median(errors)
    alarms = np.subtract.outer(errors, limits) > 0
    assert alarms.mean() < 1e-5


# -- decisions that no input affects --------------------------------------------------------------


def floor_of_log(x: Tensor) -> Tensor:
    distance = torch.arange(1, 130, dtype=x.dtype)
    return (distance.log() / np.log(2)).floor().long()


def in_place(x: Tensor) -> Tensor:
    distance = torch.arange(1, 130, dtype=x.dtype)
    distance.div_(8).log_().mul_(8 / np.log(16))
    return torch.where(distance < 0, 0, distance).to(torch.long)


def compared(x: Tensor) -> Tensor:
    angle = torch.stack([torch.arange(130, dtype=x.dtype) / 10] * 2)
    return angle[0].view(13, 10) * 10 >= torch.arange(13)[:, None] * 10


def bucketized(x: Tensor) -> Tensor:
    return torch.bucketize(torch.arange(130, dtype=x.dtype) / 10, torch.arange(13) / 1.0)


def ceil_of_a_learned_step(x: Tensor) -> Tensor:
    return (torch.arange(130, dtype=x.dtype) * torch.tensor(0.1, dtype=x.dtype).exp().log()).ceil()


DECISIONS = [floor_of_log, in_place, compared, bucketized, ceil_of_a_learned_step]


@pytest.mark.parametrize("decide", DECISIONS, ids=lambda decide: decide.__name__)
def test_a_decision_that_no_input_affects_is_that_of_the_module(decide):
    x = torch.from_numpy(drawn(4, 4))
    with Decisions([x]) as recorded:
        right = decide(x)

    def differ(follow: bool) -> bool:
        changed, wide = False, x.double()
        for seed in range(8):
            repeated = Decisions([wide], recorded.made if follow else None)
            with RandomRounding(EPS, EPS, seed), repeated:
                changed |= not torch.equal(decide(wide), right.to(decide(wide).dtype))
        return changed

    assert not differ(follow=True)
    assert differ(follow=False)


def test_a_decision_from_an_input_is_rounded_and_so_are_values_without_inputs():
    x = torch.arange(1, 130).double()

    def all_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        buffer = torch.zeros(129, dtype=x.dtype)
        buffer[:64] = x[:64]  # through a view
        positions = torch.arange(1, 130, dtype=x.dtype).log()
        return (x.log() / np.log(2)).floor(), (buffer.log() / np.log(2)).floor(), positions

    with Decisions([x]) as recorded:
        all_of(x)
    with RandomRounding(EPS, EPS, 3), Decisions([x], recorded.made):
        rounded = all_of(x)
    assert not any(torch.equal(a, b) for a, b in zip(rounded, all_of(x), strict=True))


class Buckets(nn.Module):
    """Attention with a bias for each bucket of distances, as in T5."""

    def __init__(self, buckets: int = 16, longest: float = 128, shift: int = 0) -> None:
        super().__init__()
        self.buckets, self.longest, self.shift = buckets, longest, shift
        self.bias = nn.Parameter(torch.arange(24.0).cos())

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        distance = (place[:, None] - place).abs()
        half = self.buckets // 2
        far = torch.log(distance.clamp(min=1).to(x.dtype) / half) / np.log(self.longest / half)
        bucket = torch.where(distance < half, distance, half + (far * half).to(torch.long))
        bucket = bucket.clamp(max=self.buckets - 1) + self.shift * (distance == 17)
        return (x @ x.mT / 3 + self.bias[bucket]).softmax(-1) @ x


class Steps(nn.Module):
    """Attention with a bias from a distance on in steps of 0.29, which is less in float64."""

    def __init__(self, boundary: int = 29) -> None:
        super().__init__()
        self.boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        far = ((place[:, None] - place).abs() * 0.29).floor() >= self.boundary
        return (x @ x.mT / 3 + 3 * far).softmax(-1) @ x


def test_the_reference_decides_as_the_module_where_float64_would_not():
    assert 0.29 * 100 < 29
    assert np.float32(0.29) * np.float32(100) == 29
    x = torch.from_numpy(drawn(2, 102, 8))
    subject = Subject(Steps().eval(), {"x": x}, {"x": {0: "batch", 1: "query_len"}}, ["y"])
    golden = Oracle(subject).golden(Case("one", "shape", {}, {"x": x.numpy()}, ""))
    for boundary, status in ((29, "passed"), (28, "failed")):
        (verdict,) = judge("", "", golden, {"y": Steps(boundary)(x).numpy()})
        assert verdict.status == status


def test_distances_on_the_boundary_of_buckets_are_evidence():
    inputs = {"x": drawn(2, 40, 8)}
    subject = Subject(
        Buckets().eval(), {"x": torch.from_numpy(inputs["x"])},
        {"x": {0: "batch", 1: "query_len"}}, ["y"],
    )  # fmt: skip
    golden = Oracle(subject).golden(Case("one", "shape", {}, inputs, ""))
    assert not golden.uncompared
    for wrong in (Buckets(buckets=20), Buckets(longest=100), Buckets(shift=1), Buckets(shift=-1)):
        with torch.no_grad():
            outputs = {"y": wrong(torch.from_numpy(inputs["x"])).numpy()}
        assert [verdict.status for verdict in judge("", "", golden, outputs)] == ["failed"]
