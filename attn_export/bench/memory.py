"""Memory of this process, current and peak (Linux; unknown on other systems)."""

from __future__ import annotations

import re
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""proc(5): writing 5 sets VmHWM to what VmRSS is now."""


def reset_peak() -> int | None:
    """Forget the peak so far; the bytes that are resident now, or None where unknown."""
    try:
        CLEAR.write_text(RESET_PEAK)
        return _status("VmRSS")
    except OSError:
        return None


def peak() -> int | None:
    """Return the peak of resident bytes since the reset, or None if unknown."""
    try:
        return _status("VmHWM")
    except OSError:
        return None


def _status(field: str) -> int | None:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else None
