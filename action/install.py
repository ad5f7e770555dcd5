"""Installs attn-export for the action: what its input names, or the source it came with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run pip; its exit code."""
    lines = os.environ.get("ACTION_INSTALL", "").splitlines()
    wanted = [line.strip() for line in lines if line.strip()]
    source = str(Path(__file__).resolve().parent.parent)
    # After -- nothing is an option of pip, whatever the input holds.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--"]
    return subprocess.run([*command, *(wanted or [f"{source}[build,gpu]"])], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
