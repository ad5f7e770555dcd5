"""Entry point of `attn-export` and `python -m attn_export`."""

from __future__ import annotations

import gc
import signal
import sys

from attn_export.interruption import end_on_signal


def main() -> None:
    """Run the command line and exit with its code."""
    end_on_signal()
    # Traversing the millions of objects of torch and the exporter takes a third of a build's time.
    # Commands that run for long, such as `sweep`, leave their work to other processes.
    gc.disable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    from attn_export.cli import run
    from attn_export.system_info import reuse_memory

    reuse_memory()
    code = run(sys.argv[1:])
    # Ctrl-C must not change the exit code from here on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # the interpreter's last collection need not traverse them either
    # If Ctrl-C raised KeyboardInterrupt within an exec() of a library (`jobs/explain_failures.py`
    # permits that), CPython sets a flag and would end the process by the signal, not with the code.
    # Another exec() clears the flag.
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    main()
