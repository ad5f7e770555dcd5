"""`attn-export` and `python -m attn_export`."""

from __future__ import annotations

import gc
import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    # A short process: its memory is given back at its end, and walking through millions of
    # objects that torch and the exporter keep alive takes a third of the time.
    gc.disable()
    from attn_export.cli import run

    # A job that is told to end tidies up, as it does for Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    code = run(sys.argv[1:])
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
