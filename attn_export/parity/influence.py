"""Every input must matter: a case that cannot tell two inputs apart proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from attn_export.errors import ExportError
from attn_export.parity.measures import measure
from attn_export.results import BASE, CHANGED, Golden

CLEARLY = 100
"""Change of an output, in allowed errors, from which an input matters to it."""

ENOUGH = 0.1
"""Share of the output that is enough where `CLEARLY` would require more."""


def check_influence(goldens: Sequence[Golden], clearly: float = CLEARLY) -> None:
    """Compare the truth of the base case with that of the cases that change one input.

    Args:
        goldens: All cases with their truth.
        clearly: The least change of an output, as a multiple of the allowed error.

    Raises:
        ExportError: If an input changes no output, or an output reacts to no input.
    """
    by_name = {golden.case.name: golden for golden in goldens}
    base = by_name[BASE]
    reacting: set[str] = set()
    for name in base.case.inputs:
        moved = {
            out for out in base.expected if _moves(base, by_name[f"{CHANGED}{name}"], out, clearly)
        }
        if not moved:
            raise ExportError(
                f"the input {name} changes no output, so no case could show a mistake with it; "
                "remove it from the inputs"
            )
        reacting |= moved
    for out in base.expected:
        if out not in reacting:
            raise ExportError(
                f"the output {out} reacts to no input, so comparing it proves nothing; "
                "remove it from the outputs"
            )


def _moves(base: Golden, changed: Golden, output: str, clearly: float) -> bool:
    allowed = base.allowed[output]
    before, after = base.expected[output], changed.expected[output]
    if before.shape != after.shape:
        raise ExportError(
            f"the shape of {output} depends on values: {list(before.shape)} and "
            f"{list(after.shape)} for inputs of the same sizes; give it a shape of its own"
        )
    if allowed is None:
        return bool((before != after).any())
    if not before.any():
        return bool(after.any())
    # No output moves by much more than all of itself.
    enough = min(clearly * allowed.whole, max(ENOUGH, allowed.whole))
    return measure(after, before).whole > enough
