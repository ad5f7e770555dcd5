"""Known mistakes in keeping keys and values as 4 bits by block: scales, zero points, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attn_export.diagnose.block_cache_steps import BlockPart, BlockSteps, block_parts
from attn_export.diagnose.in_integer_cache import Change
from attn_export.diagnose.in_integers import round_to_bfloat16, swap_neighbours
from attn_export.diagnose.mistake import Mistake, change_value
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    from attn_export.diagnose.evaluate import Evaluation, Values

AN_OCTAVE = 8


def _added(by: int) -> Change:
    return lambda x: x + by


def _times(factor: float) -> Change:
    return lambda x: x * factor


def _rolled(by: int, axis: int) -> Change:
    return lambda x: np.roll(x, by, axis)


def _first(x: Array) -> Array:
    return x * 0 + x[..., :1]


INDICES: Final[Mapping[str, Change]] = {
    "one too large": _added(1), "one too small": _added(-1),
    "an octave too large": _added(AN_OCTAVE), "an octave too small": _added(-AN_OCTAVE),
    "rounded down to octaves": lambda i: i // AN_OCTAVE * AN_OCTAVE,
    "those of the block before": _rolled(1, -1), "those of the next block": _rolled(-1, -1),
    "those of the first block for all": _first,
    "those of the head before": _rolled(1, 1), "those of the next head": _rolled(-1, 1),
    "those of the token before": _rolled(1, 2), "those of the next token": _rolled(-1, 2),
    "those of the first token for all": lambda i: i * 0 + i[:, :, :1],
}  # fmt: skip
"""Wrong indices of scales."""

ZEROS: Final[Mapping[str, Change]] = {
    "one too large": _added(1), "one too small": _added(-1), "left out": np.zeros_like,
    "in the middle": lambda z: z * 0 - 8, "of the other sign": np.negative,
    "128 too large": _added(128), "those of the block before": _rolled(1, -1),
    "those of the next block": _rolled(-1, -1), "those of the first block for all": _first,
    "those of the token before": _rolled(1, 2), "those of the next token": _rolled(-1, 2),
    "those of the head before": _rolled(1, 1), "those of the next head": _rolled(-1, 1),
}  # fmt: skip
"""Wrong zero points."""

TABLES: Final[Mapping[str, Change]] = {
    "halved": lambda s: s / 2, "doubled": lambda s: s * 2, "squared": np.square,
    "rounded to bfloat16": round_to_bfloat16, "in the other order": lambda s: s[::-1],
    "linear within an octave": lambda s: _linear(len(s)) * s[0],
}  # fmt: skip
"""Wrong tables of scales."""


def _linear(count: int) -> Array:
    octaves, eighths = np.divmod(np.arange(count), AN_OCTAVE)
    return np.asarray(2.0**octaves * (1 + eighths / AN_OCTAVE))


PLACES: Final[Mapping[str, Sequence[str]]] = {
    "": ("stored_", "read_"), " where they are read": ("read_",),
    " where they are written": ("stored_",),
}  # fmt: skip
"""The places of wrong indices and zero points, with the starts of the steps that they are in."""

ROUNDINGS: Final[tuple[tuple[str, str, BlockSteps], ...]] = (
    ("rounding", "{} are rounded down", BlockSteps(rounds=np.floor)),
    ("rounding", "{} are rounded up", BlockSteps(rounds=np.ceil)),
    ("rounding", "{} are rounded towards 0", BlockSteps(rounds=np.trunc)),
    ("rounding", "new {} are read as they were before they are rounded",
     BlockSteps(unrounded=True)),
    ("clipped range", "integers of {} beyond 15 start at 0 again",
     BlockSteps(clips=lambda x: x % 16)),
    ("clipped range", "integers of {} beyond 15 are not clipped", BlockSteps(clips=lambda x: x)),
    ("clipped range", "integers of {} are clipped at 14",
     BlockSteps(clips=lambda x: np.minimum(x, 14))),
    ("nibble order", "the two integers of a byte of {} are swapped",
     BlockSteps(written=swap_neighbours(-1), read=swap_neighbours(-1))),
    ("nibble order", "neighbouring channels of {} are swapped where they are written",
     BlockSteps(written=swap_neighbours(-1))),
    ("nibble order", "neighbouring channels of {} are swapped where they are read",
     BlockSteps(read=swap_neighbours(-1))),
    ("cache layout", "a byte of {} is read as channels c and c + D / 2",
     BlockSteps(read=lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], -1))),
    ("cache layout", "the upper half of a byte of {} is moved by 3 bits, not 4",
     BlockSteps(packed=lambda b: (b & 15) + 8 * (b >> 4))),
    ("cache layout", "a byte holds the first of two channels of {} twice",
     BlockSteps(written=lambda q: q[..., ::2].repeat(2, -1))),
    ("stale scales", "new {} are read with scales and zero points that the cache held before",
     BlockSteps(stale=slice(None))),
)  # fmt: skip
"""Kinds of mistakes, their effects, and the steps that make them."""


def block_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of writing and reading a cache by block.

    Args:
        evaluation: The right graph.
    """
    parts = block_parts(evaluation)
    if len(parts) != 2:
        return
    both = tuple(parts.values())
    chosen = {"keys and values": both, **{name: (part,) for name, part in parts.items()}}
    for kind, says, steps in _all_steps(both[0].blocks):
        for which, some in chosen.items():
            yield _mistake(evaluation, some, kind, says.format(f"cached {which}"), steps)
    yield from _mixing(evaluation)


def _all_steps(blocks: int) -> Iterator[tuple[str, str, BlockSteps]]:
    for where, starts in PLACES.items():
        for kind, part, wrong in (
            ("cache scale", "index", INDICES), ("zero point", "zero", ZEROS),
        ):  # fmt: skip
            for name, change in wrong.items():
                fields: Any = {f"{start}{part}": change for start in starts}
                what = "scales" if part == "index" else "zero points"
                of_place = "block scale" if name.startswith("those") else kind
                yield of_place, f"the {what} of {{}} are {name}{where}", BlockSteps(**fields)
    for name, change in TABLES.items():
        says = f"the table of the scales of {{}} is {name}"
        yield "cache scale", says, BlockSteps(table=change, written_table=change)
        yield "cache scale", f"{says} where it is read", BlockSteps(table=change)
        yield "cache scale", f"{says} where it is written", BlockSteps(written_table=change)
    for far, factor in (("a step", 2 ** (1 / AN_OCTAVE)), ("an octave", 2.0)):
        for size, by in (("large", factor), ("small", 1 / factor)):
            says = f"{{}} are divided by scales {far} too {size}"
            yield "cache scale", says, BlockSteps(ranges=_times(by))
    for held, bytes_of in (("scales", slice(blocks)), ("zero points", slice(blocks, None))):
        says = f"new {{}} are read with {held} that the cache held before"
        yield "stale scales", says, BlockSteps(stale=bytes_of)
    yield from ROUNDINGS
    exchanged = "the bytes of scales and zero points of {} are exchanged where they are read"
    yield "cache layout", exchanged, BlockSteps(row=lambda row: _exchanged(row, blocks))
    for name, there, back in _orders(blocks):
        says = f"blocks of {{}} {name}"
        yield "block bounds", says, BlockSteps(ordered=there, unordered=back)
        yield "block bounds", f"{says} where they are written", BlockSteps(ordered=there)


def _exchanged(row: Array, blocks: int) -> Array:
    start, end = row.shape[-1] - 2 * blocks, row.shape[-1] - blocks
    return np.concatenate([row[..., :start], row[..., end:], row[..., start:end]], -1)


def _orders(blocks: int) -> Iterator[tuple[str, Change, Change]]:
    """Yield wrong orders of channels in blocks, each with its inverse."""
    for by in (1, 2, 8, 16):
        yield f"begin {by} channels late", _rolled(-by, -1), _rolled(by, -1)
        yield f"begin {by} channels early", _rolled(by, -1), _rolled(-by, -1)
    yield (
        f"are every channel c, c + {blocks}, …",
        lambda x: x.reshape(*x.shape[:-1], -1, blocks).swapaxes(-1, -2).reshape(x.shape),
        lambda x: x.reshape(*x.shape[:-1], blocks, -1).swapaxes(-1, -2).reshape(x.shape),
    )


def _mixing(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of the product of queries and keys with a Hadamard matrix."""
    matrix = next((n for n in evaluation.initializers if n.endswith("kv_scales.hadamard")), "")
    nodes = [n for n in evaluation.nodes if n.op_type == "MatMul" and n.input[1] == matrix]
    if len(nodes) != 2:
        return
    size = evaluation.initializers[matrix]
    unscaled = np.abs(size).max() ** -1
    for which, node in zip(("queries", "keys"), nodes, strict=True):

        def as_before(values: Values, node: Any = node) -> dict[str, Array]:
            before = values[node.input[0]]
            assert before is not None
            return {node.output[0]: before}

        says = f"{which} are not multiplied by the Hadamard matrix"
        yield Mistake("key rotation", says, node.name, as_before)
        for name, change in (
            ("without its scale", lambda x: x * unscaled),
            ("in reverse order", lambda x: x[..., ::-1]),
            ("one column late", _rolled(1, -1)),
        ):
            says = f"{which} are multiplied by the Hadamard matrix {name}"
            yield Mistake("key rotation", says, node.name, change_value(node.output[0], change))


def _mistake(
    evaluation: Evaluation, parts: Sequence[BlockPart], kind: str, says: str, steps: BlockSteps
) -> Mistake:
    def replaced(values: Values) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for part in parts:
            found |= part.replaced(evaluation, steps, values)
        return found

    return Mistake(kind, says, parts[0].scatter.name, replaced)
