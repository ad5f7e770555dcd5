"""Which shapes are tried: the lattice, in mixed order, decode first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attn_export.spec import Input

Sizes = Mapping[str, int]

TRACED_SIZES: Sizes = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 9,
}  # fmt: skip
"""The sizes of the example that is traced: all different, all at least 2."""

# B, L, P, S of cross-attention. Decode-shaped calls come first and again later: some
# runtimes keep buffers, or a branch, from the first shape that they see.
_LATTICE = (
    (1, 1, 0, 1), (1, 1, 7, 9), (2, 1, 12, 16), (3, 1, 1, 2), (1, 5, 7, 9), (2, 5, 7, 9),
    (2, 5, 0, 5), (1, 17, 0, 17), (3, 2, 3, 7), (2, 1, 0, 1), (1, 16, 1, 33), (1, 33, 0, 4),
    (1, 4, 29, 1), (3, 5, 5, 5), (2, 8, 8, 16), (1, 1, 40, 64), (5, 3, 2, 11), (1, 5, 0, 3),
    (2, 9, 16, 2), (1, 2, 1, 8), (3, 11, 4, 21), (2, 2, 0, 13), (1, 31, 2, 31), (2, 7, 9, 6),
    (4, 1, 5, 10), (1, 3, 64, 65), (7, 1, 7, 3), (2, 6, 1, 32), (1, 12, 12, 5), (2, 9, 0, 9),
    (2, 3, 31, 40), (1, 48, 0, 64), (2, 1, 63, 63), (1, 1, 1, 17), (5, 1, 9, 12), (1, 9, 3, 4),
    (2, 4, 4, 18), (3, 7, 6, 8), (1, 21, 8, 30), (4, 5, 0, 6), (1, 6, 6, 19), (5, 5, 1, 5),
)  # fmt: skip


def lattice(axes: Iterable[str], relations: Mapping[str, str] | None = None) -> list[Sizes]:
    """The sizes to try, in order.

    Args:
        axes: The names of the dynamic axes. Names other than batch, query_len, past_len,
            total_len and key_len get sizes of their own.
        relations: Axes that others add up to: ``{"total_len": "past_len + query_len"}``.

    Returns:
        At least 30 sizes where two axes vary; equal ones only once.
    """
    names = sorted(set(axes))
    relations = relations or {}
    unknown = [name for name in names if name not in TRACED_SIZES]
    found: list[Sizes] = []
    for index, (B, L, P, S) in enumerate(_LATTICE):
        row = {"batch": B, "query_len": L, "past_len": P, "total_len": P + L, "key_len": S}
        row |= {name: 1 + (index * (1 + (2 + 2 * i) % 18)) % 19 for i, name in enumerate(unknown)}
        row = with_sums(row, relations)
        sizes = {name: row[name] for name in names}
        if sizes not in found:
            found.append(sizes)
    return found


def axis_names(inputs: Mapping[str, Input], relations: Mapping[str, str]) -> list[str]:
    """The dynamic axes of some inputs, what bounds their integers, and sums of them."""
    found = {axis for wanted in inputs.values() for axis in wanted.shape if isinstance(axis, str)}
    return sorted(found | bounds(inputs) | set(relations))


def bounds(inputs: Mapping[str, Input]) -> set[str]:
    """The sizes up to which integers go."""
    return {wanted.high for wanted in inputs.values() if isinstance(wanted.high, str)}


def with_sums(sizes: Sizes, relations: Mapping[str, str]) -> dict[str, int]:
    """Sizes with those of the axes that others add up to."""
    return {**sizes} | {
        name: sum(int(t) if t.isdigit() else sizes[t] for t in terms.replace(" ", "").split("+"))
        for name, terms in relations.items()
    }


def tokens(sizes: Sizes) -> int:
    """How many rows of width E or so the inputs of a case hold, at the longest axis."""
    lengths = [size for name, size in sizes.items() if name != "batch"]
    return sizes.get("batch", 1) * max(lengths, default=1)
