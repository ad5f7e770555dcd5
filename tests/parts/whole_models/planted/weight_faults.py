"""Faults in the weights of graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from planted.edited_graph import Edited, GraphFault, Place, constants_of


def _rows(array: np.ndarray) -> np.ndarray:
    array[3] = 0
    return array


def _column(array: np.ndarray) -> np.ndarray:
    array[:, -2] = 0
    return array


def _element(array: np.ndarray) -> np.ndarray:
    array.ravel()[np.abs(array).argmax()] *= 1.1
    return array


def _heads(array: np.ndarray) -> np.ndarray | None:
    half = array.shape[1] // 2
    size = min(16, half)
    order = [*range(size, 2 * size), *range(size), *range(2 * size, array.shape[1])]
    return array[:, order]


def _int8(array: np.ndarray) -> np.ndarray:
    step = np.abs(array).max() / 127
    return np.round(array / step) * step


def _put_both(g: Edited, a: str, b: str, x: np.ndarray, y: np.ndarray) -> list[str]:
    return [*g.put(a, y), *g.put(b, x)]


def _exchanged(find: Callable[[Edited], list[str]]) -> Any:
    """Exchange two constants of one shape: the first half of them with the second."""

    def places(g: Edited) -> Iterator[Place]:
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in find(g):
            by_shape.setdefault(tuple(g.weights[name].dims), []).append(name)
        for names in by_shape.values():
            half = len(names) // 2
            for a, b in zip(names[:half], names[half : 2 * half], strict=True):
                x, y = g.constant(a), g.constant(b)
                if x is not None and y is not None and not np.array_equal(x, y):
                    yield functools.partial(_put_both, g, a, b, x.copy(), y.copy())

    return places


def _square(array: np.ndarray) -> np.ndarray | None:
    return array.T if array.shape[0] == array.shape[1] else None


def _scaled(array: np.ndarray) -> np.ndarray:
    return array * np.float32(1.01)


def _tables(g: Edited) -> list[str]:
    names = [node.input[0] for node in g.of("Gather")]
    return [name for name in names if name in g.weights and len(g.weights[name].dims) == 2]


def _frequencies(g: Edited) -> list[str]:
    """Return the initialisers that positions are multiplied with."""
    return [
        name for name, weight in g.weights.items()
        if "inv_freq" in name
        or (list(weight.dims[:1]) == [1] and any(n.op_type == "MatMul" for n in g.users(name)))
    ]  # fmt: skip


def _experts(g: Edited) -> list[str]:
    return [node.input[1] for node in g.of("TopK")]


def _one_less(array: np.ndarray) -> np.ndarray | None:
    return array - 1 if array.size == 1 and array.ravel()[0] == 2 else None


_NORMS, _BIASES = (functools.partial(Edited.vectors, bias=x) for x in (False, True))
_MATRIX, _NORM = ("weight", "initiali", "proj", "kernel"), ("norm", "weight")
_TOKENS = ("embed", "wte", "wpe", "token", "gather")

WEIGHT_FAULTS = (
    *(
        GraphFault(f"matrix: {name}", constants_of(Edited.matrices, change), _MATRIX)
        for name, change in (
            ("transposed", _square), ("two heads exchanged", _heads), ("1 % of scale", _scaled),
            ("row zeroed", _rows), ("column zeroed", _column), ("element plus 10 %", _element),
            ("as float16", lambda a: a.astype(np.float16)), ("as int8", _int8),
            ("as bfloat16", lambda a: a.astype(ml_dtypes.bfloat16)), ("other sign", np.negative),
        )
    ),
    GraphFault("matrix: of another layer", _exchanged(Edited.matrices), _MATRIX),
    GraphFault("norm: ones", constants_of(_NORMS, np.ones_like), _NORM),
    GraphFault("norm: 1 % of scale", constants_of(_NORMS, _scaled), _NORM),
    GraphFault("norm: plus 1", constants_of(_NORMS, lambda a: a + 1), _NORM),
    GraphFault("norm: of another", _exchanged(_NORMS), _NORM),
    GraphFault("bias: dropped", constants_of(_BIASES, np.zeros_like), ("bias",)),
    GraphFault("bias: twice", constants_of(_BIASES, lambda a: 2 * a), ("bias",)),
    GraphFault(
        "embedding: last row zeroed",
        constants_of(_tables, lambda a: np.r_[a[:-1], 0 * a[-1:]]), _TOKENS,
    ),
    GraphFault(
        "embedding: two rows exchanged",
        constants_of(_tables, lambda a: a[[1, 0, *range(2, len(a))]]), _TOKENS,
    ),
    GraphFault("TopK of one less", constants_of(_experts, _one_less), ("topk", "expert", "top")),
    GraphFault(
        "frequencies times 1.01", constants_of(_frequencies, _scaled),
        ("rotary", "rope", "frequenc", "cos", "sin", "position"),
    ),
)  # fmt: skip
