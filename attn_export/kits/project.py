"""A kit on disk: templates rendered with facts about a bundle, the rest copied."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.code_templates import render
from attn_export.dialect_names import ORT, ORT_NEEDED, PORTABLE, STANDARD, WEIGHTS
from attn_export.errors import UsageError
from attn_export.parity.measures import beyond_limit
from attn_export.results import DECODE, GraphFile
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import is_floating, numpy_dtype
from attn_export.tensorproto import CODES

# -- the languages that there is a kit for ------------------------------------------------------

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
        {"c": ".", "core": "core"}, ORT_FIRST, frozenset(),
        (CONFIGURE, "cmake --build build", "build/self_test"),
    ),
    "cpp": Language(
        {"cpp": ".", "core": "core"}, ORT_FIRST, frozenset(),
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


# -- facts about a bundle for the templates of a kit --------------------------------------------


NEW, PAST = "query_len", "past_len"
ENOUGH = 16
"""The number of tokens whose replay shows what is wrong: more would make a self-test slow."""


def graph_for(
    graphs: Sequence[GraphFile], dialects: Sequence[str], wanted: str | None
) -> GraphFile:
    """Return the graph that a kit runs, for all lengths.

    Args:
        graphs: The graphs of the bundle.
        dialects: The dialects that the kit's engine runs, the best first.
        wanted: One of them, or None.

    Raises:
        UsageError: If there is none.
    """
    if wanted is not None and wanted not in dialects:
        raise UsageError(f"this kit runs {', '.join(dialects)}, not {wanted}")
    for dialect in [wanted] if wanted else dialects:
        for graph in graphs:
            if graph.dialect == dialect and not graph.fixed:
                return graph
    have = ", ".join(sorted({graph.dialect for graph in graphs}))
    raise UsageError(
        f"no graph of the bundle is for this kit: it runs {wanted or ', '.join(dialects)}, and the "
        f"bundle has {have}; build it with --dialect all"
    )


def decode_graph_for(graphs: Sequence[GraphFile], graph: GraphFile) -> GraphFile | None:
    """Return the graph for one token at a time that goes with another, if there is one.

    Args:
        graphs: The graphs of the bundle.
        graph: The one for all lengths; both hold the cache alike.
    """
    return next(
        (
            other for other in graphs
            if (other.dialect, dict(other.layouts)) == (graph.dialect, dict(graph.layouts))
            and dict(other.fixed) == {NEW: 1}
        ),
        None,
    )  # fmt: skip


def facts(
    manifest: Mapping[str, Any],
    index: Mapping[str, Any],
    spec: AttentionSpec | None,
    graph: GraphFile,
    decode: GraphFile | None = None,
) -> dict[str, Any]:
    """Return the names that templates use.

    Args:
        manifest: The bundle's.
        index: Of its golden vectors.
        spec: What it was built from, unless that was a module of the user's.
        graph: The one that the kit runs.
        decode: The one that it runs for single tokens, if another.
    """
    names = [file.name for file in (graph, decode) if file is not None]
    outputs = _ends(manifest["outputs"], graph.layouts)
    return {
        "name": manifest["name"],
        "version": manifest["versions"].get("attn-export", ""),
        "ort_needed": max(
            (manifest["graphs"][name]["needs"].get("onnxruntime", ORT_NEEDED) for name in names),
            key=lambda version: [int(part) for part in version.split(".")],
        ),
        "graph": {
            "file": graph.name,
            "dialect": graph.dialect,
            "bound": dict(graph.bound),
            "decode": decode.name if decode else None,
            "layouts": {name: list(order) for name, order in graph.layouts.items()},
        },
        "files": [*names, *(name for name in manifest["files"] if name == WEIGHTS)],
        "inputs": _ends(manifest["inputs"], graph.layouts),
        "outputs": outputs,
        "cases": [
            {**case, "tolerances": [_tolerance(case, output) for output in outputs]}
            for case in index["cases"]
        ],
        "cache": _cache(manifest["inputs"]),
        "replay": _replay(spec, index["cases"]),
    }


def _ends(ends: Mapping[str, Any], layouts: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return inputs or outputs; `order` is that of their axes in the graph, `graph_axes` these."""
    found = []
    for name, end in ends.items():
        axes, dtype = end["shape"], end["dtype"]
        order = list(layouts.get(name, range(len(axes))))
        found.append(
            {
                "name": name, "dtype": dtype, "code": CODES[dtype], "axes": axes,
                "order": order, "graph_axes": [axes[axis] for axis in order],
            }
        )  # fmt: skip
    return found


def _tolerance(case: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error allowed, where one is and counts, and why the output is no evidence."""
    allowed, dtype = case["allowed"].get(output["name"]), numpy_dtype(output["dtype"])
    if not is_floating(dtype):
        allowed = None
    unusable = case["unusable"].get(output["name"], "")
    if allowed and not unusable:
        unusable = beyond_limit(allowed["whole"], allowed["row"], dtype)
    return {"allowed": None if unusable else allowed, "unusable": " ".join(unusable.split())}


def _cache(inputs: Iterable[str]) -> str:
    names = set(inputs)
    if "past_length" in names:
        return "in-place"
    return "append" if "past_key" in names else "none"


def _replay(spec: AttentionSpec | None, cases: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a case with the same results token by token: tokens see only earlier ones."""
    if spec is None or not spec.causal or spec.cache == "none":
        return None
    # Some turn keys by the length at which they came, or have scales of all tokens of a run.
    if spec.depends_on_steps:
        return None
    if spec.in_place:
        return next((case["name"] for case in cases if case["kind"] == DECODE), None)
    fitting = [
        case for case in cases
        if case["kind"] == "shape" and case["sizes"].get(PAST) == 0
        and case["sizes"].get(NEW, 0) > 1
    ]  # fmt: skip
    lengths = {case["name"]: case["sizes"][NEW] for case in fitting}
    # The shortest of those that are long enough, or else the longest.
    return min(lengths, key=lambda n: (lengths[n] < ENOUGH, abs(lengths[n] - ENOUGH)), default=None)


# -- A kit on disk: templates rendered, the rest copied -----------------------------------------


TEMPLATE = ".j2"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "build")


def write_project(language: Language, context: Mapping[str, Any], folder: Path) -> None:
    """Write a language's files.

    Args:
        language: The kit's template.
        context: Values that the templates use.
        folder: An existing folder; gets the files.
    """
    copy_sources(language, folder)
    for template in sorted(folder.rglob(f"*{TEMPLATE}")):
        template.with_suffix("").write_text(render(template, context), encoding="utf-8")
        template.unlink()


def copy_sources(language: Language, folder: Path) -> None:
    """Copy a language's files as they are.

    Args:
        language: The kit's template.
        folder: An existing folder; gets the files.
    """
    for source, place in language.folders.items():
        if (HERE / source).is_file():
            shutil.copyfile(HERE / source, folder / place)
        else:
            shutil.copytree(HERE / source, folder / place, dirs_exist_ok=True, ignore=LEFT_OUT)
