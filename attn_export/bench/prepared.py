"""Result of a maker, for the worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from attn_export.runtimes.protocol import Facts


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A candidate that is ready: loaded, its memory allocated and bound.

    Attributes:
        run: Does the work once. Its inputs are the same every time.
        facts: Facts about the run.
    """

    run: Callable[[], object]
    facts: Facts = dataclasses.field(default_factory=dict)
