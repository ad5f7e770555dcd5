"""What a kit's templates are told of its bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attn_export.errors import UsageError
from attn_export.nouns import DECODE, GraphFile
from attn_export.runtimes.ort_cpu import ORT_NEEDED
from attn_export.spec import AttentionSpec

NEW, KEYS, PAST = "query_len", "total_len", "past_len"
LONGEST = 64
"""A replay token by token of more would make a self-test slow."""


def graph_for(
    graphs: Sequence[GraphFile], dialects: Sequence[str], wanted: str | None
) -> GraphFile:
    """The graph that a kit runs: for all lengths, with inputs as the bundle's signature has them.

    Args:
        graphs: Those of the bundle.
        dialects: That the kit's engine runs, the best first.
        wanted: One of them, or None.

    Raises:
        UsageError: If there is none.
    """
    if wanted is not None and wanted not in dialects:
        raise UsageError(f"this kit runs {', '.join(dialects)}, not {wanted}")
    for dialect in [wanted] if wanted else dialects:
        for graph in graphs:
            if graph.dialect == dialect and not graph.fixed and not graph.layouts:
                return graph
    have = ", ".join(sorted({graph.dialect for graph in graphs}))
    raise UsageError(
        f"no graph of the bundle is for this kit: it runs {wanted or ', '.join(dialects)} with "
        f"caches as the signature has them, and the bundle has {have}; build it with --dialect all"
    )


def facts(
    manifest: Mapping[str, Any],
    index: Mapping[str, Any],
    spec: AttentionSpec | None,
    graph: GraphFile,
) -> dict[str, Any]:
    """The names that templates use.

    Args:
        manifest: The bundle's.
        index: Of its golden vectors.
        spec: What it was built from, unless that was a module of the user's.
        graph: The one that the kit runs.
    """
    return {
        "name": manifest["name"],
        "version": manifest["versions"].get("attn-export", ""),
        "ort_needed": ORT_NEEDED,
        "graph": {"file": graph.name, "dialect": graph.dialect, "bound": dict(graph.bound)},
        "inputs": _ends(manifest["inputs"]),
        "outputs": _ends(manifest["outputs"]),
        "cases": index["cases"],
        "cache": _cache(manifest["inputs"]),
        "replay": _replay(spec, index["cases"]),
    }


def _ends(ends: Mapping[str, Any]) -> list[dict[str, Any]]:
    from attn_export.tensorfile import CODES

    return [
        {"name": name, "dtype": end["dtype"], "code": CODES[end["dtype"]], "axes": end["shape"]}
        for name, end in ends.items()
    ]


def _cache(inputs: Iterable[str]) -> str:
    names = set(inputs)
    if "past_length" in names:
        return "in-place"
    return "append" if "past_key" in names else "none"


def _replay(spec: AttentionSpec | None, cases: Sequence[Mapping[str, Any]]) -> str | None:
    """A case that means the same token by token: each token sees those before it only."""
    if spec is None or not spec.causal or spec.cache == "none":
        return None
    if spec.rotary_scaling == "dynamic":  # turns keys by the length at which they came
        return None
    if spec.in_place:
        return next((case["name"] for case in cases if case["kind"] == DECODE), None)
    fitting = [
        case for case in cases
        if case["kind"] == "shape" and not case["sizes"][PAST] and case["sizes"]["batch"]
        and 2 <= case["sizes"][NEW] <= LONGEST
    ]  # fmt: skip
    longest = max(fitting, key=lambda case: case["sizes"][NEW], default=None)
    return longest["name"] if longest else None
