"""Which cases a subject is tried with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attn_export.cases.decode import decode_case
from attn_export.cases.draw import draw_inputs
from attn_export.cases.far import case_bytes, far_case
from attn_export.cases.probes import probe_cases
from attn_export.cases.sizes import Sizes, axis_names, lattice, tokens
from attn_export.nouns import Case
from attn_export.spec import AttentionSpec, Input, Shape

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
    sums: Mapping[str, str],
) -> Plan:
    """Choose the shapes and probes, within `GOLDEN_BYTES`.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output, for the room that its truth takes.
        spec: What the module means, if it is ours.
        sums: Sizes that others add up to.
    """
    names = axis_names(inputs, sums)
    probes = probe_cases(inputs, spec, sums)
    notes: list[str] = []
    if spec is not None:
        for choose in (far_case, decode_case):
            case, note = choose(inputs, output_shapes, spec, sums)
            probes += [case] if case else []
            notes += [note] if note else []
    room = GOLDEN_BYTES - sum(case_bytes(case.sizes, inputs, output_shapes) for case in probes)
    wanted = lattice(names, sums)
    chosen = _within(room, wanted, inputs, output_shapes)
    if len(chosen) < len(wanted):
        notes.append(
            f"{len(wanted) - len(chosen)} of {len(wanted)} shapes left out: at these dimensions "
            f"their golden vectors would take more than {GOLDEN_BYTES >> 20} MiB"
        )
    shape_cases = [_shape_case(sizes, inputs, sums) for sizes in chosen]
    return Plan((*shape_cases, *probes), tuple(notes))


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
        room -= case_bytes(sizes, inputs, output_shapes)
        if room < 0:
            break
        kept.append(sizes)
    return [sizes for sizes in wanted if sizes in kept]
