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
    # Verifying needs no PyTorch, and no CUDA unless it is asked for.
    named = os.environ.get("ACTION_RUNTIMES", "") + os.environ.get("ACTION_REQUIRE", "")
    extras = "gpu" if "ort-cuda" in named else "cpu"
    if os.environ.get("ACTION_BUILD", "").strip():
        extras = "build,gpu"
    source = f"{Path(__file__).resolve().parent.parent}[{extras}]"
    # After -- nothing is an option of pip, whatever the input holds.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--"]
    return subprocess.run([*command, *(wanted or [source])], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
