"""Faults of masks, positions and lengths, and of the cache that comes out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from graph_surgery import Graph
from mutants.mutant import Mutant, Setting
from mutants.planting import Make, Planter, Value, float_values, graphs_of, input_value, plant


def _shown(p: Planter, mask: str, at: str) -> str:
    """Return a mask with keys shown where `at` is true."""
    if p.dtype == np.bool_:
        return p("Or", mask, at)
    return p("Where", at, p("CastLike", np.float32(0), mask), mask)


def _hidden(p: Planter, mask: str, at: str) -> str:
    if p.dtype == np.bool_:
        return p("And", mask, p("Not", at))
    return p("Where", at, p("CastLike", np.float32(-np.inf), mask), mask)


def _key(p: Planter, mask: str, number: int) -> str:
    keys = p("Range", np.int64(0), _keys(p, mask), np.int64(1))
    wanted = np.int64(number) if number >= 0 else p("Add", _keys(p, mask), np.int64(number))
    return p("Equal", keys, wanted)


def _keys(p: Planter, mask: str) -> str:
    return p("Squeeze", p("Gather", p("Shape", mask), np.array([-1]), axis=0))


def ignored(p: Planter, mask: str) -> str:
    return _shown(p, mask, np.array(True))


def inverted(p: Planter, mask: str) -> str:
    if p.dtype == np.bool_:
        return p("Not", mask)
    zero, hidden = (p("CastLike", np.float32(x), mask) for x in (0, -np.inf))
    return p("Where", p("IsInf", p("Cast", mask, to=1)), zero, hidden)


def shifted(by: int) -> Make:
    def make(p: Planter, mask: str) -> str:
        keys = _keys(p, mask)
        counted = p("Range", np.int64(0), keys, np.int64(1))
        return p("Gather", mask, p("Mod", p("Add", counted, np.int64(by)), keys), axis=-1)

    return make


def of_one(axis: int, number: int) -> Make:
    """Return what takes one row of an axis for all."""

    def make(p: Planter, x: str) -> str:
        size = p.size(x, axis)
        picked = p("Expand", np.array([number]), size)
        return p("Gather", x, picked, axis=axis)

    return make


def visible(number: int, *, from_keys: int = 0) -> Make:
    def make(p: Planter, mask: str) -> str:
        at = _key(p, mask, number)
        if from_keys:
            at = p("And", at, p("GreaterOrEqual", _keys(p, mask), np.int64(from_keys)))
        return _shown(p, mask, at)

    return make


def added_where_seen(p: Planter, mask: str) -> str:
    """Lose the finite values of a floating mask."""
    return p("Where", p("IsInf", p("Cast", mask, to=1)), mask, p("CastLike", np.float32(0), mask))


MASKS: tuple[tuple[str, str, Make], ...] = (
    ("a", "key 0 always visible", visible(0)),
    ("a", "key 0 always visible", visible(0, from_keys=16)),
    ("a", "last key always visible", visible(-1)),
    ("j", "a key always hidden", lambda p, m: _hidden(p, m, _key(p, m, 0))),
    ("j", "a key always hidden", lambda p, m: _hidden(p, m, _key(p, m, -1))),
    ("j", "mask ignored", ignored),
    ("j", "mask inverted", inverted),
    ("j", "mask shifted", shifted(1)),
    ("j", "mask shifted", shifted(-1)),
    ("j", "mask of one row of the batch", of_one(0, 0)),
)


def in_inputs(setting: Setting) -> Iterator[Mutant]:
    """Yield faults of masks, positions, lengths and the cache."""
    mask = input_value(setting.model, "attn_mask")
    if mask is not None:
        found = list(MASKS)
        shape = setting.model.graph.input
        dims = next(i for i in shape if i.name == "attn_mask").type.tensor_type.shape.dim
        for axis, of in ((1, "head"), (2, "query")):
            if len(dims) == 4 and dims[axis].dim_value != 1:
                found.append(("j", f"mask of one {of}", of_one(axis, 0)))
        if mask.dtype != np.bool_:
            found.append(("j", "finite mask lost", added_where_seen))
        yield from _each(mask, found)
    for name in ("position_ids", "past_length"):
        value = input_value(setting.model, name)
        if value is not None:
            yield from _each(value, INTEGERS[name])
    yield from _cache(setting)


def _each(value: Value, kinds: list[tuple[str, str, Make]]) -> Iterator[Mutant]:
    for row, kind, make in kinds:
        yield Mutant(
            kind, row, f"{kind}: {value.name}",
            lambda model, make=make: plant(model, value, make),
        )  # fmt: skip


def _plus(by: int) -> Make:
    return lambda p, x: p("Add", x, p("CastLike", np.int64(by), x))


INTEGERS: dict[str, list[tuple[str, str, Make]]] = {
    "position_ids": [
        ("j", "positions late", _plus(1)),
        ("j", "positions early", _plus(-1)),
        ("j", "positions ignored", lambda p, x: p("Expand", p.counted(x, 1), p("Shape", x))),
        ("j", "positions of one row", of_one(0, 0)),
        ("j", "positions of one query", of_one(1, 0)),
    ],
    "past_length": [
        ("j", "lengths of one row", of_one(0, 0)),
        ("j", "lengths late", _plus(1)),
        ("j", "lengths early", _plus(-1)),
    ],
}


# -- the cache -----------------------------------------------------------------------------------


def _last_key(p: Planter, x: str) -> str:
    """Keep the last key alone."""
    keys, last = p.counted(x, 2), p("Sub", p.number(x, 2), np.int64(1))
    at = p("Unsqueeze", p("Equal", keys, last), np.array([1]))
    return p("Where", at, x, 0.0)


def _without_last_key(p: Planter, x: str) -> str:
    keys, last = p.counted(x, 2), p("Sub", p.number(x, 2), np.int64(1))
    return p("Where", p("Unsqueeze", p("Equal", keys, last), np.array([1])), 0.0, x)


def _reversed(p: Planter, x: str) -> str:
    keys, last = p.counted(x, 2), p("Sub", p.number(x, 2), np.int64(1))
    return p("Gather", x, p("Sub", last, keys), axis=2)


PRESENT: list[tuple[str, str, Make]] = [
    ("j", "last key of the cache alone", _last_key),
    ("j", "last key of the cache lost", _without_last_key),
    ("j", "cache in reverse", _reversed),
    ("j", "cache of one row", of_one(0, 0)),
    ("j", "cache + 1e-3", lambda p, x: p("Add", x, 1e-3)),
]


def _cache(setting: Setting) -> Iterator[Mutant]:
    for value in float_values(setting.model):
        if value.path == () and value.name.startswith(("past_", "present_")):
            yield from _each(value, PRESENT)
    outputs = {output.name for output in setting.model.graph.output}
    if "present_key" in outputs:
        kind = "present key and value swapped"
        yield Mutant(kind, "j", kind, _swap_presents)


def _swap_presents(model: onnx.ModelProto) -> None:
    swapped = {"present_key": "present_value", "present_value": "present_key"}
    for _, graph in graphs_of(Graph(model).model):
        for node in graph.nodes:
            node.output[:] = [swapped.get(name, name) for name in node.output]
            node.input[:] = [swapped.get(name, name) for name in node.input]
