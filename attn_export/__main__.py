"""Entry point of `attn-export` and `python -m attn_export`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from typing import NoReturn

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
    from attn_export.commands.main import run
    from attn_export.system_info import reuse_memory, set_for_torch

    reuse_memory()
    set_for_torch()
    code = run(sys.argv[1:])
    # Ctrl-C must not change the exit code from here on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End the process without freeing its objects, which takes 0.2 s after an export."""
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):  # its reader has ended
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
