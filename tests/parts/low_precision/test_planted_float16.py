"""Faults in how a cache in float16 is written and read: truth 1 catches each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from cache_faults import Fault, Graph, wrong_outputs
from conftest import small_spec
from named_causes import first_cause
from onnx import TensorProto, helper
from shared import once, passed_bundle

from attn_export import build
from attn_export.graph.load import load_model
from attn_export.parts.low_precision.in_caches import IN_FLOAT16_CACHES
from attn_export.results import StoredCase

pytestmark = pytest.mark.xdist_group("test_planted_float16")  # its bundles are shared

SPECS = {
    "grouped": {"rotary": "half", "attn_mask": "none"},
    "wide": {"embed_dim": 128, "num_heads": 4, "num_kv_heads": 4, "attn_mask": "none"},
}
CASES = ("base", "changed_past_key", "decode_300")


def casts(graph: Graph, to: int) -> list[onnx.NodeProto]:
    """Return the casts of keys and of values: to float16, before they are written, or back."""
    found = [node for node in graph.linear("Cast") if node.attribute[0].i == to]
    if to == TensorProto.FLOAT:
        found = [node for node in found if node.input[0].startswith("present_")]
    assert len(found) == 2
    return found


def before_rounding(part: int, *nodes: tuple[str, object]) -> Fault:
    """Return a fault that puts nodes with a constant each in front of a cast to float16."""

    def fault(graph: Graph) -> None:
        cast = casts(graph, TensorProto.FLOAT16)[part]
        for number, (op_type, operand) in enumerate(nodes):
            name = f"planted_{part}_{number}.out"
            given = [cast.input[0]]
            if isinstance(operand, int):
                node = helper.make_node(op_type, given, [name], to=operand)
            else:
                given.append(graph.constant(np.asarray(operand, np.float32)))
                node = helper.make_node(op_type, given, [name])
            graph.insert(cast, node)
            cast.input[0] = name

    return fault


def unrounded(part: int) -> Fault:
    """Let the attention read new rows that were not rounded: the cache alone is in float16."""

    def fault(graph: Graph) -> None:
        to, back = casts(graph, TensorProto.FLOAT16), casts(graph, TensorProto.FLOAT)
        (scatter,) = (n for n in graph.linear("TensorScatter") if n.input[1] == to[part].output[0])
        wide = helper.make_node("Cast", [scatter.input[0]], ["wide_past"], to=TensorProto.FLOAT)
        mode = scatter.attribute
        given = ["wide_past", to[part].input[0], *scatter.input[2:]]
        written = helper.make_node("TensorScatter", given, ["wide_cache"])
        written.attribute.extend(mode)
        graph.insert(back[part], wide, written)
        for node in graph.nodes:
            for index, name in enumerate(node.input):
                if name == back[part].output[0]:
                    node.input[index] = "wide_cache"

    return fault


def read_with(part: int, op_type: str, operand: float) -> Fault:
    """Return a fault that changes what is read from the cache."""

    def fault(graph: Graph) -> None:
        back = casts(graph, TensorProto.FLOAT)[part]
        name, place = back.output[0], next(i for i, n in enumerate(graph.nodes) if n is back)
        back.output[0] = "read"
        constant = graph.constant(np.float32(operand))
        graph.nodes.insert(place + 1, helper.make_node(op_type, ["read", constant], [name]))

    return fault


def exchanged(graph: Graph) -> None:
    """Write values as keys, and keys as values."""
    first, second = casts(graph, TensorProto.FLOAT16)
    first.input[0], second.input[0] = second.input[0], first.input[0]


FAULTS: dict[str, Fault] = {
    f"{name}, {part}": make(number)
    for number, part in enumerate(("keys", "values"))
    for name, make in {
        "new rows read before they are rounded": unrounded,
        # half a unit in the last place less, or nearly
        "rounded towards 0": lambda n: before_rounding(n, ("Mul", 1 - 2.0**-12)),
        "rounded away from 0": lambda n: before_rounding(n, ("Mul", 1 + 2.0**-12)),
        "rounded to bfloat16 first": lambda n: before_rounding(
            n, ("Cast", TensorProto.BFLOAT16), ("Cast", TensorProto.FLOAT)
        ),
        "clipped at 1": lambda n: before_rounding(n, ("Min", 1.0)),
        "scaled by a step as it is written": lambda n: before_rounding(n, ("Mul", 1 + 2.0**-10)),
        "scaled by a step as it is read": lambda n: read_with(n, "Mul", 1 + 2.0**-10),
        "moved by a step of 1": lambda n: before_rounding(n, ("Add", 2.0**-10)),
    }.items()
} | {"keys and values exchanged": exchanged}  # fmt: skip


def bundle_of(kind: str) -> Path:
    spec = small_spec(**{"cache": "in-place", "kv_dtype": "float16", **SPECS[kind]})
    if kind == "grouped":  # of the same spec there
        return passed_bundle("float16-cache/grouped", spec)

    def make(folder: Path) -> None:
        options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
        assert build(spec, folder, name="float16", **options).passed

    return once(f"planted-float16/{kind}", make)


def chosen(cases: Sequence[StoredCase]) -> list[StoredCase]:
    return [case for case in cases if case.name in CASES]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.every(2)
def test_a_float16_cache_that_is_kept_rightly_passes(kind: str):
    assert wrong_outputs(bundle_of(kind), None, chosen) == 0


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.every(4)
def test_a_float16_cache_that_is_kept_wrongly_fails(kind: str, name: str):
    assert wrong_outputs(bundle_of(kind), FAULTS[name], chosen) > 0, name


CAUSES = {
    f"{name}, {part}": "cache rounding"
    for name in ("new rows read before they are rounded", "rounded to bfloat16 first")
    for part in ("keys", "values")
} | {"keys and values exchanged": "keys and values exchanged"}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.every(4)
def test_the_cause_is_named_first(kind: str, name: str):
    right = load_model(bundle_of(kind) / "model.onnx")
    wrong = Graph(right)
    FAULTS[name](wrong)
    assert first_cause(bundle_of(kind), right, wrong.proto) == CAUSES[name]


def test_known_roundings_give_the_neighbour_that_they_state():
    x = np.random.default_rng(0).normal(size=(1, 1, 200, 8)) * 10.0 ** np.arange(-3, 5)
    x[..., 0, :] = [0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 65504.0, -65504.0]  # exact in float16
    with np.errstate(over="ignore"):  # beyond the largest number is infinity
        toward_zero, away = (
            row.changes["rounded"](None, {"x": x}).astype(np.float64)
            for row in IN_FLOAT16_CACHES
            if row.effect.endswith("not to nearest")
        )
    assert (np.abs(toward_zero) <= np.abs(x)).all()
    assert (np.abs(x) <= np.abs(away)).all()
    exact = x == x.astype(np.float16)
    assert (toward_zero[exact] == away[exact]).all()
    assert (np.nextafter(np.abs(toward_zero[~exact]).astype(np.float16), np.float16(np.inf))
            == np.abs(away[~exact]).astype(np.float16)).all()  # fmt: skip
