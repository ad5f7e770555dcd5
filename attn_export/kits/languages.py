"""The languages that there is a kit for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from attn_export.dialect_names import ORT, PORTABLE, STANDARD
from attn_export.errors import UsageError

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Language:
    """A kit's template.

    Attributes:
        folders: Folders and files of this package, and the place of each in the kit.
        dialects: Forms of the graph that its engine runs, the fastest first.
        without: Types of inputs that its engine's interface does not take.
        test: The commands that build it and run its self-test.
    """

    folders: Mapping[str, str]
    dialects: tuple[str, ...]
    without: frozenset[str]
    test: tuple[str, ...]


ORT_FIRST = (ORT, STANDARD, PORTABLE)
BFLOAT16 = frozenset({"bfloat16"})

ORT_PLACEHOLDER = "/path/to/onnxruntime"
CONFIGURE = f"cmake -S . -B build -DONNXRUNTIME_ROOT={ORT_PLACEHOLDER}"

LANGUAGES: Mapping[str, Language] = {
    "c": Language(
        {"c": "."}, ORT_FIRST, frozenset(),
        (CONFIGURE, "cmake --build build", "build/self_test"),
    ),
    "cpp": Language(
        {"cpp": "."}, ORT_FIRST, frozenset(),
        (CONFIGURE, "cmake --build build", "build/self_test"),
    ),
    "node": Language(
        {"node": ".", "js": "src"}, ORT_FIRST, BFLOAT16,
        ("npm ci --ignore-scripts", "npm test"),
    ),
    # WebGPU is wrong in contrib operators, and has no Attention.
    "web": Language(
        {"web": ".", "js": "lib"}, (PORTABLE,), BFLOAT16,
        ("npm ci --ignore-scripts", "npm start"),
    ),
    "python": Language(
        {"python": ".", "../parity/measures.py": "attn_kit/measures.py",
         "../tensorproto.py": "attn_kit/tensorproto.py",
         "../runtimes/eight_bit_sums.py": "attn_kit/eight_bit_sums.py"}, ORT_FIRST, BFLOAT16,
        ("python3 -m venv .venv", ".venv/bin/pip install .", ".venv/bin/attn-kit-test"),
    ),
}  # fmt: skip


def language(name: str) -> Language:
    """Return the language of this name.

    Raises:
        UsageError: If there is none.
    """
    if name not in LANGUAGES:
        raise UsageError(f"unknown language {name!r}; choose from {', '.join(LANGUAGES)}")
    return LANGUAGES[name]
