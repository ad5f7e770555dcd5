"""Which cases a subject is tried with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from attn_export.cases.draw import concrete, draw_inputs
from attn_export.cases.probes import probe_cases
from attn_export.cases.sizes import Sizes, axis_names, lattice, tokens, with_sums
from attn_export.nouns import Case
from attn_export.spec import AttentionSpec, Input, Shape
from attn_export.tensorfile import numpy_dtype

FAR_BYTES = 8 * 2**20
"""What the one case with far keys may take."""

GOLDEN_BYTES = 32 * 2**20
"""What the golden vectors of a bundle may take on disk."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cases, and what the reader should know about how they were chosen."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...]


def plan_cases(
    inputs: Mapping[str, Input],
    output_shapes: dict[str, Shape],
    spec: AttentionSpec | None,
    relations: Mapping[str, str],
) -> Plan:
    """Choose the shapes and probes, within `GOLDEN_BYTES`.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output, for the room that its truth takes.
        spec: What the module means, if it is ours.
        relations: Axes that others add up to.
    """
    names = axis_names(inputs, relations)
    probes = probe_cases(inputs, spec, relations)
    notes: list[str] = []
    reaches = _reaches(spec)
    far = [_far_keys(inputs, spec, relations, reach) for reach in reaches if spec]
    fitting = [c for c in far if _bytes(c.sizes, inputs, output_shapes) <= FAR_BYTES]
    probes += fitting[:1]
    if len(fitting) < len(far):
        notes.append(
            f"no case reaches the end of the window or of the relative positions, {reaches[0]} "
            f"keys away: at these dimensions it would take more than {FAR_BYTES >> 20} MiB"
        )
    room = GOLDEN_BYTES - sum(_bytes(case.sizes, inputs, output_shapes) for case in probes)
    wanted = lattice(names, relations)
    chosen = _within(room, wanted, inputs, output_shapes)
    if len(chosen) < len(wanted):
        notes.append(
            f"{len(wanted) - len(chosen)} of {len(wanted)} shapes left out: at these dimensions "
            f"their golden vectors would take more than {GOLDEN_BYTES >> 20} MiB"
        )
    shape_cases = [_shape_case(sizes, inputs, relations) for sizes in chosen]
    return Plan((*shape_cases, *probes), tuple(notes))


def _reaches(spec: AttentionSpec | None) -> list[int]:
    """How many keys away something changes (a window ends, the last bucket begins), far first."""
    if spec is None:
        return []
    relative = spec.relative_max_distance if spec.relative_buckets else 0
    dynamic = spec.rotary_original_len if spec.rotary_scaling == "dynamic" else 0
    found = {spec.window_left or 0, spec.window_right or 0, relative, dynamic}
    return sorted(found - {0}, reverse=True)


def _far_keys(
    inputs: Mapping[str, Input],
    spec: AttentionSpec,
    relations: Mapping[str, str],
    reach: int,
) -> Case:
    """Two queries, or more, that have keys beyond a reach, none of them masked."""
    past = reach + 2 if spec.has_cache else 0
    sizes = {"batch": 1, "query_len": 2 if past else reach + 4, "past_len": past}
    sizes = with_sums(sizes, relations) if past else {k: sizes[k] for k in ("batch", "query_len")}
    drawn = draw_inputs(inputs, sizes, seed_words=("probe", "far_keys"))
    if spec.mask:
        drawn["attn_mask"][...] = True if spec.mask.dtype == "bool" else 0.0
    return Case("far_keys", "probe", sizes, drawn, f"keys more than {reach} away")


def _shape_case(sizes: Sizes, inputs: Mapping[str, Input], sums: Mapping[str, str]) -> Case:
    letters = {"batch": "B", "query_len": "L", "past_len": "P", "key_len": "S"}
    shown = [f"{letters.get(n, n)}{size}" for n, size in sizes.items() if n not in sums]
    name = "shape_" + "_".join(shown)
    drawn = draw_inputs(inputs, sizes, seed_words=("shape", name))
    return Case(name, "shape", sizes, drawn, "random inputs")


def _within(
    room: int,
    wanted: list[Sizes],
    inputs: Mapping[str, Input],
    output_shapes: dict[str, Shape],
) -> list[Sizes]:
    """The shapes, in their order, without the largest ones as far as room is short."""
    by_size = sorted(wanted, key=tokens)
    kept: list[Sizes] = []
    for sizes in by_size:
        room -= _bytes(sizes, inputs, output_shapes)
        if room < 0:
            break
        kept.append(sizes)
    return [sizes for sizes in wanted if sizes in kept]


def _bytes(
    sizes: Sizes,
    inputs: Mapping[str, Input],
    output_shapes: dict[str, Shape],
) -> int:
    """What a case takes on disk: its inputs, and its outputs twice (truth and eager)."""
    widths = {name: numpy_dtype(wanted.dtype).itemsize for name, wanted in inputs.items()}
    width = max(widths.values())
    taken = sum(
        widths[name] * math.prod(concrete(wanted.shape, sizes)) for name, wanted in inputs.items()
    )
    # An axis of which nothing is known counts as the longest one.
    known = {**sizes, "": max(sizes.values(), default=1)}
    outputs = sum(width * math.prod(concrete(shape, known)) for shape in output_shapes.values())
    return taken + 2 * outputs
