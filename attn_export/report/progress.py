"""A progress bar on stderr while a job works; nothing without a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from attn_export.interruption import undo_at_end


class Progress:
    """Progress reports of a job. This class discards them."""

    def phase(self, text: str) -> None:
        """Start a part of the work."""

    def expect(self, steps: int) -> None:
        """Expect this number of steps."""

    def advance(self, text: str) -> None:
        """Count one step."""


class BarProgress(Progress):
    """A bar, drawn by rich."""

    def __init__(self, bar: object) -> None:
        from rich.progress import Progress as Bar

        assert isinstance(bar, Bar)
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._expected = 0

    def phase(self, text: str) -> None:
        """Show it."""
        self._bar.update(self._task, description=text)

    def expect(self, steps: int) -> None:
        """Extend the bar."""
        self._expected += steps
        self._bar.update(self._task, total=self._expected)

    def advance(self, text: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=text, advance=1)


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield a bar on stderr if that is a terminal, otherwise a silent object."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    # The stream as it is now: while exporting, what the exporter prints goes elsewhere.
    columns = (BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description:.48}"))
    with (
        undo_at_end(_show_cursor),
        Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar,
    ):
        yield BarProgress(bar)


def _show_cursor() -> None:
    # By hand: whoever holds rich's locks may be the code that a signal came upon.
    with contextlib.suppress(OSError):
        os.write(2, b"\r\x1b[2K\x1b[?25h")
