"""Progress bar of a job on stderr, if stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attn_export.runtimes.run_options import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class _BarProgress(Progress):
    """Progress displayed as a bar of rich."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._expected = 0

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def expect(self, steps: int) -> None:
        self._expected += steps
        self._bar.update(self._task, total=self._expected)

    def advance(self, text: str) -> None:
        self._bar.update(self._task, description=text, advance=1)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        self._bar.stop()
        yield
        self._bar.start()  # not after an error, which is shown next


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield a progress bar if stderr is a terminal and `quiet` is not set, else nothing shown."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    # The console keeps the present stream, because `sys.stderr` is redirected during an export.
    columns = (BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description:.48}"))
    with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        yield _BarProgress(bar)
