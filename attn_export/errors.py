"""The errors of attn-export: one tree, one exit code each.

Every message is one line that says what was wrong, with which value, and what
to do. The command line prints it and exits with the code; it never shows a
traceback for one of these.
"""

from __future__ import annotations

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


class AttnExportError(Exception):
    """Base of every error that attn-export raises on purpose."""

    exit_code = 1


class UsageError(AttnExportError):
    """A wrong option, spec or output folder."""

    exit_code = 2


class SpecError(UsageError):
    """A spec that describes no attention: the message names the rule and the values."""


class WeightsError(UsageError):
    """A checkpoint that cannot be read, or that does not hold the attention asked for."""


class OutputError(UsageError):
    """An output folder that cannot be written."""


class ExportError(AttnExportError):
    """A module that cannot be exported, or whose export would not be the same function."""

    exit_code = 3


class GraphError(AttnExportError):
    """An ONNX file that cannot be read, or that a check refused."""

    exit_code = 4


class RuntimeFailure(AttnExportError):  # noqa: N818 (RuntimeError means something else)
    """A runtime that was asked for by name and crashed, hung, refused or is missing."""

    exit_code = 5


class ParityError(AttnExportError):
    """Outputs that are not the same attention."""

    exit_code = 6


class BundleError(AttnExportError):
    """A bundle that is incomplete or was changed after it was written."""

    exit_code = 7


LINE = 300
"""How much of a foreign error's text is kept."""


def one_line(error: BaseException) -> str:
    """What an error of another library says, as one line."""
    words = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {words[:LINE] or 'no message'}"
