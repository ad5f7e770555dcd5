"""The errors of attn-export, with their exit codes.

Every message is one line that states the problem, the value, and the remedy. The command line
prints the message without a traceback, and exits with the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

READER_GONE = 141
"""The exit code if the reader of the output has closed it: 128 + SIGPIPE, as in other tools."""

LINE = 300
"""The usual largest number of characters of a message."""

PARAGRAPH = 2000
"""The largest number of characters of a message that lists things, and of other lines."""


def printable(text: object, most: int = LINE) -> str:
    r"""Return an untrusted text as one line that is harmless in a terminal or CI log.

    Line breaks and tabs become spaces. Other unprintable characters are escaped: ESC becomes
    ``\x1b``. Of a longer text, the middle is left out.
    """
    words = " ".join(str(text).split())
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in words
    )
    if len(shown) <= most:
        return shown
    end = most // 3
    return f"{shown[: most - end - 1]}…{shown[-end:]}"


def choose(name: str, known: Iterable[str]) -> str:
    """Return what a message on an unknown name ends with: the nearest known one, and all."""
    names = list(known)
    near = nearest(name, names)
    return f"{near and near + ' '}choose from {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean X?`` with the nearest known name; "" if none is near."""
    from difflib import get_close_matches  # few runs need it

    return "".join(f"did you mean {near}?" for near in get_close_matches(name, list(known), 1))


class AttnExportError(Exception):
    """Base class of the errors of attn-export."""

    exit_code = 1
    most = LINE

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message, self.most))


class UsageError(AttnExportError):
    """A wrong option, spec or output folder."""

    exit_code = 2


class SpecError(UsageError):
    """A spec that breaks a rule. The message states the rule and the values."""


class WeightsError(UsageError):
    """A checkpoint that cannot be read, or that lacks the requested attention.

    The message may list tensors with their shapes, or all layers.
    """

    most = PARAGRAPH


class OutputError(UsageError):
    """An output folder that cannot be written."""


class ExportError(AttnExportError):
    """A module that cannot be exported, or whose export would compute something else."""

    exit_code = 3


class GraphError(AttnExportError):
    """An ONNX file that cannot be read or lowered, or that a check refused."""

    exit_code = 4


class RuntimeFailure(AttnExportError):  # noqa: N818 (RuntimeError means something else)
    """A required runtime that crashed, hung, refused a graph, or is missing."""

    exit_code = 5


class ParityError(AttnExportError):
    """Outputs that differ from the reference by more than the tolerance."""

    exit_code = 6


class BundleError(AttnExportError):
    """A bundle that is incomplete or was changed after it was written."""

    exit_code = 7


def one_line(error: BaseException) -> str:
    """Return the message of another library's error, as one line."""
    return f"{type(error).__name__}: {printable(error) or 'no message'}"


def why_unread(error: OSError | ValueError) -> str:
    """Return why a file cannot be read: the system's words without its path, or what it holds."""
    return getattr(error, "strerror", None) or one_line(error)


_OUT_OF_MEMORY = (
    "bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory",
    "annot allocate memory", "can't allocate memory", "failed to map segment",
)  # fmt: skip
"""Parts of messages that report a lack of memory, of what is allocated or mapped."""

_OUT_OF_THREADS = (
    "can't start new thread", "pthread_create", "Resource temporarily unavailable",
)  # fmt: skip


def lacking(error: BaseException) -> str:
    """Return what the system lacks by an error: ``"memory"``, ``"threads"``, or ``""``."""
    text = str(error)
    if isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY):
        return "memory"
    return "threads" if any(part in text for part in _OUT_OF_THREADS) else ""


def counted(number: int, name: str) -> str:
    """Return a number with the singular or plural of a name: ``1 case``, ``2 cases``."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def first_few(names: Sequence[str]) -> str:
    """Return the first three names, followed by an ellipsis if there are more: ``a, b, c …``."""
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
