"""The truth of cases, computed when it is needed: most faults show in one of the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attn_export.results import Case, Golden


class Truth:
    """The truth of the cases of a subject; that of each case is computed once."""

    def __init__(self, cases: Sequence[Case], golden_of: Callable[[Case], Golden]) -> None:
        self.cases = cases
        self._golden_of = golden_of
        self._known: dict[str, Golden] = {}

    def of(self, case: Case) -> Golden:
        """Return the truth of one of the cases."""
        if case.name not in self._known:
            self._known[case.name] = self._golden_of(case)
        return self._known[case.name]
