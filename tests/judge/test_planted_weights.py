"""Faults in how integers are read as weights: truth 1 catches each, whatever the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import small_spec
from named_causes import first_cause
from onnx import numpy_helper
from refused_outputs import refused_outputs
from shared import once

from attn_export import build
from attn_export.explain.in_weights import WEIGHT_ROWS
from attn_export.float64.evaluate import Evaluation
from attn_export.graph.load import load_model

pytestmark = pytest.mark.xdist_group("test_planted_weights")  # its bundles are shared

Weights = dict[str, np.ndarray]
Fault = Callable[[Weights], None]

W = "v_proj.weight"
SPECS = {
    "int4": {"weights_dtype": "int4", "block_size": 16},
    "uint4": {"weights_dtype": "int4", "block_size": 16, "scheme": "asymmetric"},
    "int8": {"weights_dtype": "int8"},
    "uint8": {"weights_dtype": "int8", "scheme": "asymmetric"},
}
SQUARE = {"num_kv_heads": 4}  # so that a weight may be read transposed


def bundle_of(kind: str) -> Path:
    def make(folder: Path) -> None:
        spec = small_spec(**SQUARE, **SPECS[kind])
        options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
        assert build(spec, folder, name="few bits", **options).passed

    return once(f"planted/{kind}", make)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def fault(held: Weights) -> None:
        held[name] = change(held[name].astype(np.float64))

    return fault


def swapped_nibbles(q: np.ndarray) -> np.ndarray:
    """Return rows `[in, out]` with neighbouring outputs swapped: ONNX packs two into a byte."""
    return q.reshape(*q.shape[:-1], -1, 2)[..., ::-1].reshape(q.shape)


def reread(bits: int, *, signed: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Return the numbers that the same bits are in the type of the other sign."""
    span, half = 2**bits, 2 ** (bits - 1)

    def change(q: np.ndarray) -> np.ndarray:
        return q % span if signed else (q + half) % span - half

    return change


def requantised(q: np.ndarray) -> np.ndarray:
    """Return integers that were made of the integers again, with a coarser scale of their own."""
    scale = np.abs(q).max(axis=0) / 5.3
    return np.clip(np.rint(np.rint(q / scale) * scale), q.min(), q.max())


def first_block_alone(s: np.ndarray) -> np.ndarray:
    return np.broadcast_to(s[:1], s.shape).copy()


def ends_of_three_quarters(q: np.ndarray) -> tuple[int, int]:
    """Return the least and the largest integer of the middle three quarters of a range."""
    values = np.arange(int(q.min()), int(q.max()) + 1)
    eighth = (len(values) - 1) // 8
    middle = values[eighth : len(values) - eighth]
    return int(middle[0]), int(middle[-1])


SCALE, ZERO = f"{W}_scale", f"{W}_zero_point"
ANY: dict[str, Fault] = {
    "scale squared": changed(SCALE, np.square),
    "scale halved": changed(SCALE, lambda s: s / 2),
    "scale rounded to 8 digits": changed(
        SCALE, lambda s: np.ldexp(np.rint(np.frexp(s)[0] * 256) / 256, np.frexp(s)[1])
    ),
    "scales of the next output": changed(SCALE, lambda s: np.roll(s, 1, -1)),
    "scales in reverse order": changed(SCALE, lambda s: s[..., ::-1].copy()),
    "scale of one output for all": changed(SCALE, lambda s: s * 0 + s[..., :1]),
    "scale of one output doubled": changed(
        SCALE, lambda s: s * np.where(np.arange(s.shape[-1]) == 3, 2, 1)
    ),
    "weight transposed": changed(W, np.transpose),
    "integers one higher": changed(W, lambda q: q + 1),
    "one integer off by one": changed(W, lambda q: q + (np.arange(q.size).reshape(q.shape) == 77)),
    "range clipped to 3/4": changed(W, lambda q: np.clip(q, *ends_of_three_quarters(q))),
    "quantised twice": changed(W, requantised),
    "the weight of k": lambda held: held.update({W: held["k_proj.weight"]}),
    "last row left out": changed(W, lambda q: q * (np.arange(len(q)) < len(q) - 1)[:, None]),
}
OF_NIBBLES: dict[str, Fault] = {"nibbles swapped": changed(W, swapped_nibbles)}
OF_BLOCKS: dict[str, Fault] = {
    "scales of the next block": changed(SCALE, lambda s: np.roll(s, 1, 0)),
    "scales of the first block for all": changed(SCALE, first_block_alone),
    "blocks of twice the size": changed(SCALE, lambda s: np.repeat(s[::2], 2, 0)),
    "scale of the wrong axis": changed(SCALE, lambda s: s.T.reshape(s.shape)),
}
OF_ZEROS: dict[str, Fault] = {
    "zero point one higher": changed(ZERO, lambda z: z + 1),
    "zero point one lower": changed(ZERO, lambda z: z - 1),
    "one zero point off by one": changed(
        ZERO, lambda z: z + (np.arange(z.size).reshape(z.shape) == 5)
    ),
    "zero points left out": changed(ZERO, lambda z: z * 0),
    "zero points in the middle": changed(ZERO, lambda z: z * 0 + 2 ** round(np.log2(z.max()))),
    "zero points of the next output": changed(ZERO, lambda z: np.roll(z, 1, -1)),
}
PLANTED = [
    (kind, name, fault)
    for kind in SPECS
    for faults in (
        ANY,
        OF_NIBBLES | OF_BLOCKS if kind.endswith("4") else {},
        OF_ZEROS if kind.startswith("u") else {},
        {"signs read wrongly": changed(W, reread(int(kind[-1]), signed=not kind.startswith("u")))},
    )
    for name, fault in faults.items()
]


def of_float_weights(
    model: onnx.ModelProto,
) -> tuple[Weights, Callable[[Weights], onnx.ModelProto]]:
    """Return the integers of a graph, and what makes it a graph of the weights that they mean."""
    held = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}

    def made(weights: Weights) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        (node,) = (
            n for n in copy.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == W
        )
        scales = np.atleast_2d(weights[SCALE])
        zeros = np.atleast_2d(weights.get(ZERO, np.zeros_like(scales)))
        rows = len(weights[W]) // len(scales)
        meant = (weights[W] - zeros.repeat(rows, 0)) * scales.repeat(rows, 0)
        copy.graph.initializer.append(numpy_helper.from_array(meant.astype(np.float32), "meant"))
        node.CopyFrom(onnx.helper.make_node("Identity", ["meant"], node.output, name=node.name))
        return copy

    return held, made


def wrong_outputs(kind: str, fault: Fault | None) -> int:
    """Return the number of outputs that the judge refuses, of the first cases of a bundle."""
    folder = bundle_of(kind)
    held, made = of_float_weights(load_model(folder / "model.onnx"))
    if fault is not None:
        before = {name: array.copy() for name, array in held.items()}
        fault(held)
        assert any(not np.array_equal(held[name], before[name]) for name in held), "no change"
    evaluation = Evaluation(made(held))
    return refused_outputs(
        folder, lambda inputs: evaluation.outputs_of(evaluation.values(inputs)),
        lambda cases: cases[:3],
    )  # fmt: skip


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.every(4)
def test_integers_that_are_read_rightly_pass(kind: str):
    assert wrong_outputs(kind, None) == 0


@pytest.mark.parametrize(
    ("kind", "name", "fault"), PLANTED, ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.every(4)
def test_integers_that_are_read_wrongly_fail(kind: str, name: str, fault: Fault):
    assert wrong_outputs(kind, fault) > 0, name


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [(-127, 127, (-96, 96)), (0, 255, (31, 224)), (-7, 7, (-6, 6)), (0, 15, (1, 14))],
)
def test_a_clipped_range_loses_as_many_integers_at_both_ends(
    low: int, high: int, ends: tuple[int, int]
):
    (changes,) = (changes for kind, _, changes in WEIGHT_ROWS if kind == "clipped range")
    q = np.arange(low, high + 1, dtype=np.float64)[:, None]
    clipped = changes["weight"](q, {})
    assert (clipped.min(), clipped.max()) == ends == ends_of_three_quarters(q)


# -- causes -------------------------------------------------------------------------------------

CAUSES = {
    "one integer off by one": "", "one zero point off by one": "",  # no mistake of a kind
    "scale squared": "weight scale", "scale halved": "weight scale",
    "scale rounded to 8 digits": "weight scale", "scale of one output doubled": "weight scale",
    "weight transposed": "weight transposed", "integers one higher": "zero point",
    "range clipped to 3/4": "clipped range", "quantised twice": "quantised twice",
    "the weight of k": "wrong weight", "last row left out": "rows left out",
    "nibbles swapped": "nibble order", "signs read wrongly": "signedness",
} | {name: "zero point" for name in OF_ZEROS if not name.startswith("one ")}  # fmt: skip
"""The kind of the cause that `explain` names first; of other faults it is "scale axis"."""

OFTEN = {
    ("int4", "scale squared"), ("int4", "nibbles swapped"), ("uint4", "zero points left out"),
    ("int8", "one integer off by one"), ("uint8", "signs read wrongly"),
}  # fmt: skip
MORE = pytest.mark.extended


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [each if each[:2] in OFTEN else pytest.param(*each, marks=MORE) for each in PLANTED],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_cause_is_named_first(kind: str, name: str, fault: Fault):
    right = load_model(bundle_of(kind) / "model.onnx")
    held, made = of_float_weights(right)
    fault(held)
    assert first_cause(bundle_of(kind), right, made(held)) == CAUSES.get(name, "scale axis")
