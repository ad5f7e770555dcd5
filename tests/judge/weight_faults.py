"""Faults in how the integers of a weight are read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from graph_surgery import Graph
from onnx import helper
from planted_faults import Edit, Faults, digits, neighbours

W = "v_proj.weight"
INTEGERS, SCALE = range(2)
Change = Callable[[np.ndarray], np.ndarray]


def read(part: int, change: Change, of: str = "") -> Edit:
    """Return the fault that a part of a weight is another: it is read as floats of wrong values.

    `of`: The name of what is changed, if it is not this part.
    """

    def edit(graph: Graph) -> None:
        (node,) = (n for n in graph.all("DequantizeLinear") if n.input[0] == W)
        held = [graph.initializer(name).astype(np.float64) for name in node.input]
        right = held[part]
        held[part] = change(graph.initializer(of).astype(np.float64) if of else right.copy())
        assert not np.array_equal(held[part], right), "no change"
        integers, scales = held[INTEGERS], np.atleast_2d(held[SCALE])
        blocks = integers.reshape(len(scales), -1, integers.shape[-1])
        meant = (blocks * scales[:, None]).reshape(integers.shape).astype(np.float32)
        node.CopyFrom(
            helper.make_node("Identity", [graph.constant(meant, "meant")], node.output, node.name)
        )

    return edit


def reread(q: np.ndarray) -> np.ndarray:
    """Return the numbers that the same bits are in the type of the other sign."""
    half = 2.0 ** np.ceil(np.log2(np.abs(q).max() / (1 if q.min() < 0 else 2)))
    return q % (2 * half) if q.min() < 0 else (q + half) % (2 * half) - half


def requantised(q: np.ndarray) -> np.ndarray:
    """Return integers that were made of the integers again, with a coarser scale of their own."""
    scale = np.abs(q).max(axis=0) / 5.3
    return np.clip(np.rint(np.rint(q / scale) * scale), q.min(), q.max())


def ends_of_three_quarters(q: np.ndarray) -> tuple[int, int]:
    """Return the least and the largest integer of the middle three quarters of a range."""
    values = np.arange(int(q.min()), int(q.max()) + 1)
    eighth = (len(values) - 1) // 8
    middle = values[eighth : len(values) - eighth]
    return int(middle[0]), int(middle[-1])


def one_more(place: int) -> Change:
    return lambda x: x + (np.arange(x.size).reshape(x.shape) == place)


ANY: Faults = {
    "one integer off by one": ("", read(INTEGERS, one_more(77))),
    "the weight of k": ("wrong weight", read(INTEGERS, np.array, of="k_proj.weight")),
    "scale squared": ("weight scale", read(SCALE, np.square)),
    "scale halved": ("weight scale", read(SCALE, lambda s: s / 2)),
    "scale rounded to 8 digits": ("weight scale", read(SCALE, digits(8))),
    "scale of one output doubled": ("weight scale", read(
        SCALE, lambda s: s * np.where(np.arange(s.shape[-1]) == 3, 2, 1))),
    "scales of the next output": ("scale axis", read(SCALE, lambda s: np.roll(s, 1, -1))),
    "scales in reverse order": ("scale axis", read(SCALE, lambda s: s[..., ::-1])),
    "scale of one output for all": ("scale axis", read(SCALE, lambda s: s * 0 + s[..., :1])),
    "weight transposed": ("weight transposed", read(INTEGERS, np.transpose)),
    "integers one higher": ("zero point", read(INTEGERS, lambda q: q + 1)),
    "range clipped to 3/4": ("clipped range", read(
        INTEGERS, lambda q: np.clip(q, *ends_of_three_quarters(q)))),
    "quantised twice": ("quantised twice", read(INTEGERS, requantised)),
    "last row left out": ("rows left out", read(
        INTEGERS, lambda q: q * (np.arange(len(q)) < len(q) - 1)[:, None])),
    "signs read wrongly": ("signedness", read(INTEGERS, reread)),
}  # fmt: skip
OF_NIBBLES: Faults = {
    "nibbles swapped": ("nibble order", read(INTEGERS, neighbours)),
    "scales of the next block": ("scale axis", read(SCALE, lambda s: np.roll(s, 1, 0))),
    "scales of the first block for all": ("scale axis", read(SCALE, lambda s: s * 0 + s[:1])),
    "blocks of twice the size": ("scale axis", read(SCALE, lambda s: np.repeat(s[::2], 2, 0))),
    "scale of the wrong axis": ("scale axis", read(SCALE, lambda s: s.T.reshape(s.shape))),
}
