"""The table of known mistakes: a fault is planted for each kind, and rows differ."""

from __future__ import annotations

import ast
from collections import Counter

from conftest import ROOT

from attn_export.explain.known import KNOWN, MANY

PLANTED_IN = ("explain/graph_faults", "explain/hard_faults", "explain/test_planted_*",
              "parity/test_planted_*")  # fmt: skip
"""The files whose tests plant faults and require their cause by its kind."""

UNPLANTED = {
    "K/V heads reversed", "bias added twice", "cache length", "cache not written", "causal added",
    "causal reversed", "first key dropped", "heads interleaved", "heads reversed", "heads shifted",
    "input order", "last key dropped", "length of one batch row", "mask dropped beside causal",
    "mask lowest is hidden", "mask of one head", "mask of one query", "mask of some keys",
    "mask or causal", "mask scaled", "mask shifted", "mask values dropped", "missing sinks",
    "norm without weight", "one K/V head for all", "own key alone", "past after new keys",
    "past ignored", "past of one batch row", "past shifted", "positions of one batch row",
    "positions reversed", "rotary pairs", "rotation sign", "rotation swapped", "softmax base",
    "softmax not normalised", "softmax plus one", "window dropped",
}  # fmt: skip
"""Kinds of mistakes that no test plants yet; a new kind is planted."""


def planted() -> set[str]:
    """Return the texts of the files that plant faults."""
    files = [file for name in PLANTED_IN for file in (ROOT / "tests").glob(f"{name}.py")]
    return {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_each_kind_is_planted():
    assert {mistake.kind for mistake in (*KNOWN, *MANY)} - planted() == UNPLANTED


def test_no_two_rows_say_the_same_of_a_place():
    said = Counter((mistake.at, mistake.kind, mistake.effect) for mistake in (*KNOWN, *MANY))
    assert [row for row, count in said.items() if count > 1] == []
