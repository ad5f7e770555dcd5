"""`attn-export` and `python -m attn_export`."""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

from attn_export.errors import INTERRUPTED


def main() -> None:
    """Run the command line and exit with its code."""
    # A short process: its memory is given back at its end, and walking through millions of
    # objects that torch and the exporter keep alive takes a third of the time.
    gc.disable()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # A job that is told to end tidies up, as it does for Ctrl-C; nohup stays nohup.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        from attn_export.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    # Whoever is impatient with the end of the process gets no traceback for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    # Where Ctrl-C came within an exec() of some library, CPython remembers it and would end the
    # process by the signal, whatever the code. The next exec() makes it forget.
    exec("")
    sys.exit(code)


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
