"""`attn-export` and `python -m attn_export`."""

from __future__ import annotations

import gc
import signal
import sys

from attn_export.interruption import end_on_signal


def main() -> None:
    """Run the command line and exit with its code."""
    end_on_signal()
    # A short process: its memory is given back at its end, and walking through millions of
    # objects that torch and the exporter keep alive takes a third of the time.
    gc.disable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    from attn_export.cli import run

    code = run(sys.argv[1:])
    # Whoever is impatient with the end of the process changes nothing about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    # Where Ctrl-C came within an exec() of some library (`jobs/explain_failures.py` lets it raise),
    # CPython remembers it and would end the process by the signal, whatever the code. The next
    # exec() makes it forget.
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    main()
