"""`attn-export runtimes`: list the runtimes."""

from __future__ import annotations

from attn_export.commands.options import with_help
from attn_export.commands.output import echo
from attn_export.dialect_names import DIALECTS
from attn_export.runtimes.catalogue import all_runtimes, runtimes_of_parts


@with_help("Runtimes and speed", "runtimes")
def runtimes_command() -> int:
    """List the runtimes: version, device and dialects, or the reason why one cannot run here."""
    for runtime in all_runtimes():
        reason = runtime.unavailable()
        runs = " ".join(name for name in DIALECTS if name in runtime.dialects)
        state = f"unavailable: {reason}" if reason else f"{runtime.device}: {runs}"
        echo(f"{runtime.name:<15} {runtime.version() or '-':<10} {state}")
    for runtime, about in runtimes_of_parts():
        reason = runtime.unavailable()
        state = f"unavailable: {reason}" if reason else about
        echo(f"{runtime.name:<23} {runtime.version() or '-':<10} {state}")
    return 0
