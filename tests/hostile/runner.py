"""A process that runs commands of `attn-export`, one after another, and says what came of each.

`python runner.py` reads lists of words, a line of JSON each, and writes the exit code and the
output of each. Importing for each command would take most of the time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings


def main() -> None:
    """Serve until the input ends."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from attn_export.commands.main import run

    for line in sys.stdin:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            code = run(json.loads(line))
        channel.write(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}))
        channel.write("\n")
        channel.flush()


if __name__ == "__main__":
    main()
