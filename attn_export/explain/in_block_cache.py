"""Known mistakes in a KV cache of 4 bits with block scales: scales, zero points, tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from attn_export.errors import counted
from attn_export.explain.block_cache_steps import BlockSteps, block_parts
from attn_export.explain.in_integer_cache import OF_ANY_CACHE, OF_PACKED_CACHE
from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    change_value,
    join,
    keys_and_values,
    round_to_bfloat16,
    skip_node,
)
from attn_export.float64.evaluate import Evaluation
from attn_export.tensorfile import Array

OCTAVE = 8
"""The number of scales in an octave: each is 2^(1/8) times the one before."""


def _add(by: int) -> ArrayChange:
    return lambda x: x + by


def _roll(by: int, axis: int) -> ArrayChange:
    return lambda x: np.roll(x, by, axis)


def _first_block(x: Array) -> Array:
    return x * 0 + x[..., :1]


INDICES: Final[Mapping[str, ArrayChange]] = {
    "one too large": _add(1), "one too small": _add(-1),
    "an octave too large": _add(OCTAVE), "an octave too small": _add(-OCTAVE),
    "rounded down to octaves": lambda i: i // OCTAVE * OCTAVE,
    "those of the previous block": _roll(1, -1), "those of the next block": _roll(-1, -1),
    "those of the first block for all": _first_block,
    "those of the previous head": _roll(1, 1), "those of the next head": _roll(-1, 1),
    "those of the previous token": _roll(1, 2), "those of the next token": _roll(-1, 2),
    "those of the first token for all": lambda i: i * 0 + i[:, :, :1],
}  # fmt: skip
"""Wrong scale indices, `[B, Hkv, tokens, blocks]`."""

ZEROS: Final[Mapping[str, ArrayChange]] = {
    "one too large": _add(1), "one too small": _add(-1), "left out": np.zeros_like,
    "in the middle": lambda z: z * 0 - 8, "of the other sign": np.negative,
    "128 too large": _add(128), "those of the previous block": _roll(1, -1),
    "those of the next block": _roll(-1, -1), "those of the first block for all": _first_block,
    "those of the previous token": _roll(1, 2), "those of the next token": _roll(-1, 2),
    "those of the previous head": _roll(1, 1), "those of the next head": _roll(-1, 1),
}  # fmt: skip
"""Wrong zero points, `[B, Hkv, tokens, blocks]`."""

TABLES: Final[Mapping[str, ArrayChange]] = {
    "halved": lambda s: s / 2, "doubled": lambda s: s * 2, "squared": np.square,
    "rounded to bfloat16": round_to_bfloat16, "in the other order": lambda s: s[::-1],
    "linear within an octave": lambda s: _linear(len(s)) * s[0],
}  # fmt: skip
"""Wrong tables of scales, `[256]`."""


def _linear(count: int) -> Array:
    octaves, eighths = np.divmod(np.arange(count), OCTAVE)
    return np.asarray(2.0**octaves * (1 + eighths / OCTAVE))


PLACES: Final[Mapping[str, Sequence[str]]] = {
    "": ("stored_", "read_"), " when the cache is read": ("read_",),
    " when the cache is written": ("stored_",),
}  # fmt: skip
"""Ends of sentences on a wrong index or zero point, with the prefixes of the steps that use it."""

STEPS: Final[tuple[tuple[str, str, BlockSteps], ...]] = (
    *((kind, effect, BlockSteps(**steps))
      for kind, effect, steps in (*OF_ANY_CACHE, *OF_PACKED_CACHE)),
    ("clipped range", "integers of {} beyond 15 start at 0 again",
     BlockSteps(clips=lambda x: x % 16)),
    ("clipped range", "integers of {} beyond 15 are not clipped", BlockSteps(clips=lambda x: x)),
    ("clipped range", "integers of {} are clipped at 14",
     BlockSteps(clips=lambda x: np.minimum(x, 14))),
    ("cache layout", "a byte of {} is read as channels c and c + D / 2",
     BlockSteps(read=lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], -1))),
    ("stale scales", "new {} are read with scales and zero points that the cache held before",
     BlockSteps(stale=slice(None))),
)  # fmt: skip
"""Kind, effect and steps of each mistake; ``{}`` stands for the keys and values."""


def block_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of writing and reading a cache with block scales."""
    parts = block_parts(evaluation)
    if not parts:
        return
    for kind, effect, steps in _all_steps(parts["keys"].blocks):
        for described, changed in keys_and_values(parts).items():
            changes = (functools.partial(part.replaced, evaluation, steps) for part in changed)
            node = changed[0].scatter.name
            yield Mistake(kind, effect.format(f"cached {described}"), node, join(changes))
    yield from _rotation_mistakes(evaluation)


def _all_steps(blocks: int) -> Iterator[tuple[str, str, BlockSteps]]:
    """Yield kind, effect and steps of each mistake, as in `STEPS`, for `blocks` in a token."""
    for where, prefixes in PLACES.items():
        for wrong_kind, field, described, changes in (
            ("cache scale", "index", "scales", INDICES),
            ("zero point", "zero", "zero points", ZEROS),
        ):
            for name, change in changes.items():
                fields: Any = {f"{prefix}{field}": change for prefix in prefixes}
                kind = "block scale" if name.startswith("those") else wrong_kind
                yield kind, f"the {described} of {{}} are {name}{where}", BlockSteps(**fields)
    for name, change in TABLES.items():
        effect = f"the table of the scales of {{}} is {name}"
        yield "cache scale", effect, BlockSteps(table=change, written_table=change)
        yield "cache scale", f"{effect} where it is read", BlockSteps(table=change)
        yield "cache scale", f"{effect} where it is written", BlockSteps(written_table=change)
    for distance, factor in (("a step", 2 ** (1 / OCTAVE)), ("an octave", 2.0)):
        for size, by in (("large", factor), ("small", 1 / factor)):
            effect = f"{{}} are divided by scales {distance} too {size}"
            yield "cache scale", effect, BlockSteps(ranges=functools.partial(np.multiply, by))
    for stale_part, bytes_of in (("scales", slice(blocks)), ("zero points", slice(blocks, None))):
        effect = f"new {{}} are read with {stale_part} that the cache held before"
        yield "stale scales", effect, BlockSteps(stale=bytes_of)
    yield from STEPS
    exchange = functools.partial(_swap_scales_and_zeros, blocks=blocks)
    effect = "the bytes of scales and zero points of {} are exchanged when the cache is read"
    yield "cache layout", effect, BlockSteps(read_bytes=exchange)
    for name, reorder, restore in _orders(blocks):
        effect = f"blocks of {{}} {name}"
        yield "block bounds", effect, BlockSteps(ordered=reorder, unordered=restore)
        yield "block bounds", f"{effect} when the cache is written", BlockSteps(ordered=reorder)


def _swap_scales_and_zeros(cache: Array, blocks: int) -> Array:
    start, end = cache.shape[-1] - 2 * blocks, cache.shape[-1] - blocks
    return np.concatenate([cache[..., :start], cache[..., end:], cache[..., start:end]], -1)


def _orders(blocks: int) -> Iterator[tuple[str, ArrayChange, ArrayChange]]:
    """Yield a clause on each wrong order of channels, the reordering and its inverse."""
    for by in (1, 2, 8, 16):
        yield f"begin {counted(by, 'channel')} late", _roll(-by, -1), _roll(by, -1)
        yield f"begin {counted(by, 'channel')} early", _roll(by, -1), _roll(-by, -1)
    yield (
        f"are every channel c, c + {blocks}, …",
        lambda x: x.reshape(*x.shape[:-1], -1, blocks).swapaxes(-1, -2).reshape(x.shape),
        lambda x: x.reshape(*x.shape[:-1], blocks, -1).swapaxes(-1, -2).reshape(x.shape),
    )


def _rotation_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rotating queries and keys by a Hadamard matrix."""
    matrix = next((n for n in evaluation.initializers if n.endswith("kv_scales.hadamard")), "")
    nodes = [n for n in evaluation.nodes if n.op_type == "MatMul" and n.input[1] == matrix]
    if len(nodes) != 2:
        return
    values = evaluation.initializers[matrix]
    unscaled = np.abs(values).max() ** -1
    for operand, node in zip(("queries", "keys"), nodes, strict=True):
        effect = f"{operand} are not multiplied by the Hadamard matrix"
        yield Mistake("key rotation", effect, node.name, skip_node(node))
        for name, change in (
            ("without its scale", lambda x: x * unscaled),
            ("in reverse order", lambda x: x[..., ::-1]),
            ("one column late", _roll(1, -1)),
        ):
            effect = f"{operand} are multiplied by the Hadamard matrix {name}"
            yield Mistake("key rotation", effect, node.name, change_value(node.output[0], change))
