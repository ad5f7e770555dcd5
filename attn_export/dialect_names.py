"""Names of the dialects, and of the files of their graphs and weights."""

from __future__ import annotations

from collections.abc import Iterable

from attn_export.errors import UsageError

STANDARD, PORTABLE, ORT, CUDA = DIALECTS = ("standard", "portable", "ort", "cuda")
"""The dialects of graphs: ai.onnx with `Attention`, opset 18, and ONNX Runtime's own operators, as
they are fastest on the CPU, and in half precision on CUDA."""

MODEL = "model.onnx"
"""The file name of the graph in the standard dialect; the names of the others follow from it."""

ORT_NEEDED = "1.28"
"""The first ONNX Runtime whose CPU `Attention` passes every case: measured on 1.22 to 1.31, of
which 1.22 lacks the opset, and 1.23 to 1.27 give NaN or numbers out of nowhere for a fully masked
row."""

WEIGHTS = "weights.safetensors"
"""The file with the weights that no graph holds itself."""


def check_dialects(names: Iterable[str], *also: str) -> tuple[str, ...]:
    """Return the named dialects, each once.

    Args:
        names: The names.
        also: Names to allow beside `DIALECTS`.

    Raises:
        UsageError: If there is no dialect of a name.
    """
    names, known = tuple(dict.fromkeys(names)), (*DIALECTS, *also)
    for name in names:
        if name not in known:
            raise UsageError(f"unknown dialect {name!r}; choose from {', '.join(known)}")
    return names


def graph_name(dialect: str, phase: str = "") -> str:
    """Return the file name of a graph of a bundle: ``model.onnx``, ``model.ort.decode.onnx``.

    Args:
        dialect: One of `DIALECTS`.
        phase: ``"decode"`` or ``"prefill"``, or empty for the graph of any phase.
    """
    stem, suffix = MODEL.split(".")
    return ".".join(filter(None, [stem, "" if dialect == STANDARD else dialect, phase, suffix]))


def phase_of(name: str) -> str:
    """Return the phase in the file name of a graph of a bundle; "" for that of any phase."""
    return next((part for part in name.split(".")[1:-1] if part not in DIALECTS), "")
