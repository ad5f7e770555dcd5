"""Progress bar of a job, on stderr if that is a terminal, or in a notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attn_export.errors import printable
from attn_export.runtimes.run_options import Progress, RunKeywords, RunOptions

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


class _ListedProgress(Progress):
    """Progress as a line of stderr for each step, after the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def phase(self, text: str) -> None:
        line = f"{time.monotonic() - self._start:7.1f} s  {printable(text)}"
        sys.stderr.write(f"{line}\n")

    def advance(self, text: str) -> None:
        self.phase(text)


class _NotebookProgress(Progress):
    """Progress displayed as a bar of HTML in the output of a notebook's cell."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._done = self._expected = 0
        self._place = display(HTML(""), display_id=True)

    def phase(self, text: str) -> None:
        of = f' max="{self._expected}" value="{self._done}"' if self._expected else ""
        self._place.update(self._html(f"<progress{of}></progress> {html.escape(text)}"))

    def expect(self, steps: int) -> None:
        self._expected += steps

    def advance(self, text: str) -> None:
        self._done += 1
        self.phase(text)

    def remove(self) -> None:
        """Leave the output of the cell without a bar."""
        self._place.update(self._html(""))


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@contextlib.contextmanager
def options_of_call(run: RunOptions | None, keywords: RunKeywords) -> Iterator[RunOptions]:
    """Yield the options of a job that Python code called.

    Its progress is shown unless the caller receives it, or has made the options itself.
    """
    options = RunOptions.of(run, **keywords)
    if run is not None or "progress" in keywords:
        yield options
        return
    with progress(quiet=False) as bar:
        yield dataclasses.replace(options, progress=bar)


@contextlib.contextmanager
def progress(*, quiet: bool, verbose: bool = False) -> Iterator[Progress]:
    """Yield a bar in a notebook or if stderr is a terminal, or lines if `verbose` is set."""
    if verbose and not quiet:
        yield _ListedProgress()
        return
    if not quiet and _in_notebook():
        cell = _NotebookProgress()
        try:
            yield cell
        finally:
            cell.remove()
        return
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
