"""Faults of numbers: rounded, flushed, clipped, spread over the batch, wrong where equal."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from mutants.mutant import Mutant, Setting
from mutants.planting import Make, Planter, float_values, plant

LN2 = float(np.log(2.0))


def rounded(bits: int) -> Make:
    """Round to so many bits of mantissa."""

    def make(p: Planter, x: str) -> str:
        limits = ml_dtypes.finfo(p.dtype)
        size = p("Abs", x)
        usual = p(
            "And",
            p("Greater", size, float(limits.smallest_normal) * 4),
            p("Less", size, float(limits.max) / 4),
        )
        safe = p("Where", usual, size, 1.0)
        power = p("Pow", 2.0, p("Floor", p("Mul", p("Log", safe), 1 / LN2)))
        step = p("Mul", power, 2.0 ** (1 - bits))
        return p("Where", usual, p("Mul", p("Round", p("Div", x, step)), step), x)

    return make


def flushed(limit: float) -> Make:
    return lambda p, x: p("Where", p("Less", p("Abs", x), limit), 0.0, x)


def clipped(limit: float) -> Make:
    return lambda p, x: p("Clip", x, -float(limit), float(limit))


def wrong_above(limit: float) -> Make:
    return lambda p, x: p("Where", p("Greater", p("Abs", x), float(limit)), p("Mul", x, 1.01), x)


def mixed(share: float) -> Make:
    """Add a share of the mean over the batch."""

    def make(p: Planter, x: str) -> str:
        mean = p("ReduceMean", x, np.array([0]), keepdims=1)
        return p("Add", x, p("Mul", mean, share))

    return make


def spread(p: Planter, x: str) -> str:
    """Add 0 times the sum over the batch: what is not finite reaches all rows."""
    total = p("ReduceSum", x, np.array([0]), keepdims=1)
    return p("Add", x, p("Mul", total, 0.0))


def zero_where_any_is_nan(p: Planter, x: str) -> str:
    bad = p("Cast", p("IsNaN", x), to=1)
    return p("Where", p("Greater", p("ReduceMax", bad, keepdims=0), np.float32(0)), 0.0, x)


def wrong_where_equal(p: Planter, x: str) -> str:
    """Add to rows of equal elements."""
    axis = np.array([-1])
    same = p("Equal", p("ReduceMax", x, axis), p("ReduceMin", x, axis))
    return p("Where", same, p("Mul", x, 1.01), x)


def ties_apart(p: Planter, x: str) -> str:
    """Prefer the later ones of the largest elements of a row."""
    top = p("Equal", x, p("ReduceMax", x, np.array([-1])))
    # float16 has no CumSum in some runtimes.
    count = p("CumSum", p("Cast", top, to=1), np.array(-1))
    several = p("Greater", p("ReduceMax", count, np.array([-1])), np.float32(1))
    more = p("Cast", p("Mul", count, np.float32(0.3)), to=int(_type_of(p)))
    return p("Where", p("And", several, top), p("Add", x, more), x)


def _type_of(p: Planter) -> int:
    return {"float32": 1, "float16": 10, "bfloat16": 16}[p.dtype.name]


KINDS: tuple[tuple[str, str, Make], ...] = (
    *(("h", f"rounded to {bits} bits", rounded(bits)) for bits in (17, 16, 14, 12, 11, 8)),
    *(("g", f"flushed below {limit:g}", flushed(limit)) for limit in (1e-30, 1e-35, 1.2e-38)),
    *(("e", f"clipped at {limit}", clipped(limit)) for limit in (30, 60, 100, 300, 500)),
    *(("e", f"wrong above {limit}", wrong_above(limit)) for limit in (14, 60, 250, 800)),
    *(("e2", f"clipped at {limit}", clipped(limit)) for limit in (1500, 5000, 20000)),
    *(("e2", f"wrong above {limit}", wrong_above(limit)) for limit in (1500, 5000, 20000)),
    ("e", "wrong where a row is equal", wrong_where_equal),
    ("e", "ties set apart", ties_apart),
    ("f", "not finite spreads over the batch", spread),
    ("f", "zero where anything is NaN", zero_where_any_is_nan),
    ("j", "mean of the batch added", mixed(1e-3)),
    ("j", "times 1.01", lambda p, x: p("Mul", x, 1.01)),
    ("j", "negated", lambda p, x: p("Neg", x)),
)  # fmt: skip


def in_values(setting: Setting) -> Iterator[Mutant]:
    """Yield each fault of numbers at each value."""
    for value in float_values(setting.model):
        for row, kind, make in KINDS:
            yield Mutant(
                kind, row, f"{kind}: {value.name} ({value.operator})",
                lambda model, value=value, make=make: plant(model, value, make),
            )  # fmt: skip
