"""The errors of attn-export: one tree, one exit code each.

Every message is one line that names the problem, the value, and what
to do. The command line prints it and exits with the code; it never shows a
traceback for one of these.
"""

from __future__ import annotations

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

READER_GONE = 141
"""The exit code where nobody reads the output any more: 128 + SIGPIPE, as of other tools."""


LINE = 300
"""The largest number of characters of a message."""

PARAGRAPH = 2000
"""The largest number of characters of other lines that are printed."""


def printable(text: object, most: int = LINE) -> str:
    r"""Return a text from elsewhere as one line that a terminal, or a CI system, only shows.

    Line breaks and tabs become spaces, and other characters that are not printable their escapes:
    ESC becomes ``\x1b``. A longer text loses its middle.

    Args:
        text: Anything that has a text, such as a name in a file.
        most: The largest number of characters to return.
    """
    words = " ".join(str(text).split())
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in words
    )
    if len(shown) <= most:
        return shown
    end = most // 3
    return f"{shown[: most - end - 1]}…{shown[-end:]}"


class AttnExportError(Exception):
    """Base of every error that attn-export raises on purpose.

    Args:
        message: The message. It is made printable.
    """

    exit_code = 1
    most = LINE

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message, self.most))


class UsageError(AttnExportError):
    """A wrong option, spec or output folder."""

    exit_code = 2


class SpecError(UsageError):
    """A spec that describes no attention: the message names the rule and the values."""


class WeightsError(UsageError):
    """A checkpoint that cannot be read, or that lacks the wanted attention.

    It lists several tensors with their shapes, or all layers that there are.
    """

    most = PARAGRAPH


class OutputError(UsageError):
    """An output folder that cannot be written."""


class ExportError(AttnExportError):
    """A module that cannot be exported, or whose export would not be the same function."""

    exit_code = 3


class GraphError(AttnExportError):
    """An ONNX file that cannot be read, or that a check refused."""

    exit_code = 4


class RuntimeFailure(AttnExportError):  # noqa: N818 (RuntimeError means something else)
    """A runtime that was named by the user and crashed, hung, refused or is missing."""

    exit_code = 5


class ParityError(AttnExportError):
    """Outputs that are not the same attention."""

    exit_code = 6


class BundleError(AttnExportError):
    """A bundle that is incomplete or was changed after it was written."""

    exit_code = 7


def one_line(error: BaseException) -> str:
    """Return the message of another library's error, as one line."""
    return f"{type(error).__name__}: {printable(error) or 'no message'}"


def counted(number: int, name: str) -> str:
    """Return a number of things as text: ``1 case``, ``2 cases``.

    Args:
        number: The number.
        name: The name of one thing.
    """
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
