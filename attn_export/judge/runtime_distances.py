"""Distances of runtimes' outputs from the truth of a float model, which budgets limit."""

from __future__ import annotations

from collections.abc import Sequence

from attn_export.bundle.quality_vectors import Sums
from attn_export.measures import fill_ignored_rows
from attn_export.quality import Budget, Quality, is_finite, is_logits
from attn_export.results import Arrays, Golden, Verdict


class RuntimeDistances:
    """Sums over the cases that budgets judge, by runtime and output. No output is kept."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._budgets = tuple(budgets)
        self._sums: dict[tuple[str, str], Sums] = {}

    def add(self, verdicts: Sequence[Verdict], golden: Golden, outputs: Arrays) -> None:
        """Add the floating outputs of a case, in the rows that are compared.

        Those with a wrong shape, type, NaN or infinity failed already.
        """
        for verdict in verdicts:
            if verdict.whole is not None:
                name = verdict.output
                truth = (golden.floats if golden.rounds_inputs else golden.expected)[name]
                compared = golden.case.ignored_rows, golden.determined.get(name, ())
                got = fill_ignored_rows(outputs[name], truth, *compared)
                sums = self._sums.setdefault((name, verdict.runtime), Sums())
                sums.add(truth, got, as_logits=is_logits(name))

    def quality(self) -> Quality | None:
        """Return the distances; None if no output could be measured."""
        if not self._sums:
            return None
        named = [(n, f"{n} in {runtime}", sums) for (n, runtime), sums in self._sums.items()]
        outputs = [sums.distance(part) for _, part, sums in named]
        logits = [sums.logits(part) for name, part, sums in named if is_logits(name)]
        kept = tuple(filter(is_finite, outputs))
        return Quality(kept, self._budgets, tuple(logits))
