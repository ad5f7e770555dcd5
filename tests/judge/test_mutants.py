"""Faults planted into the graphs of bundles, in every dialect: the golden vectors catch them all.

`scripts/mutants` tries many more. Here is each kind once or a few times, in each graph that has the
place for it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import shared
from mutants.mutant import Mutant
from mutants.mutated_bundles import spec_of
from mutants.trial import Trials

OWN_BUNDLES = ("mqa", "mha", "in-place")
DECODE = "model.ort.decode.onnx"
FILES = {
    "mqa": ("model.onnx", "model.portable.onnx", "model.ort.onnx", "model.ort.decode.onnx"),
    "mha": ("model.onnx", "model.portable.onnx", "model.ort.onnx"),
    "in-place": ("model.onnx", "model.portable.onnx", "model.ort.onnx", "model.ort.decode.onnx"),
    "bfloat16": ("model.onnx", "model.portable.onnx", "model.ort.onnx", "model.ort.decode.onnx"),
}
PROJECTED = r"[qkv]_proj/Add.out"
ATTENDED = r"out_proj/MatMul.out"
SOFTMAX = r"Attention/Softmax"
MOST = 3
"""The largest number of mutants of one line of the table in one graph."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        row: The letter of the row of faults.
        kind: A pattern for kinds.
        place: A pattern for what the mutant says of itself.
        bundle: Whose graphs are changed.
        count: The number of graphs that have the place.
        without: A graph that is left out.
    """

    row: str
    kind: str
    place: str = ""
    bundle: str = "mqa"
    count: int = 4
    without: str = ""


TABLE = (
    Line("a", "guard of masked rows removed", count=3),
    Line("a", "key 0 always visible"),
    Line("a", "last key always visible"),
    *(
        Line("a", f"{hidden} for -inf", f"-inf( where B is 1 or P 0)?: {SOFTMAX}", count=2)
        for hidden in ("-30", "-100", r"-10000")
    ),
    *(Line("a", f"{hidden} for -inf", r"\[\]_-inf", count=3) for hidden in ("-30", "-100")),
    Line("a", "softmax without its maximum", count=2),
    Line("a", "scores clipped at 30", count=2),
    Line("a", "scores clipped at 60", count=2),
    *(
        Line("b", f"{fill} for masked rows", f", {where}$", bundle, count)
        for fill in ("NaN", "an average")
        for where in ("all", "first", "middle", "last", "B 1", "L 1", "S >= 16")
        for bundle, count in (("mqa", 4), ("mha", 3))
        if (where, bundle) != ("S >= 16", "mha")
    ),
    Line("b", "-30 for -inf, no guard", count=3),
    Line("c", "sizes of the table", "L >= 17 and P >= 10", count=3),
    Line("c", "sizes of the table", "B >= 4 and L >= 6", count=3),
    Line("c", "sizes of the table", "L >= 49", count=3),
    Line("c", "sizes of the table", "B >= 8"),
    Line("c", "sizes of the table", "S >= 69"),
    Line("d", "L beyond a block", count=3),
    Line("d", "S beyond a block"),
    *(
        Line("e", f"clipped at {limit}$", f": ({PROJECTED}|past_key|query) ")
        for limit in (30, 100, 500)
    ),
    Line("e", "wrong above 60$", "Attention/MatMul.out", count=2),
    Line("e", "wrong above 14$", ": query"),
    Line("e", "wrong where a row is equal", "Attention/Softmax.out", count=2),
    Line("f", "not finite spreads", f": ({PROJECTED}|{ATTENDED}|query|past_value) "),
    Line("f", "zero where anything is NaN", ": (output|past_key) "),
    *(
        Line("g", f"flushed below {limit}", ": (past_value|past_key) ")
        for limit in ("1e-30", "1e-35", "1.2e-38")
    ),
    *(
        Line("h", f"rounded to {bits} bits", f": ({PROJECTED}|{ATTENDED}|output) ")
        for bits in (17, 16, 14, 12, 11, 8)
    ),
    *(
        Line("h", f"rounded to {bits} bits", "Attention/(MatMul|Softmax|Where_2).out", count=3)
        for bits in (17, 16, 14, 12, 11, 8)
    ),
    *(
        Line("i", "another constant|another attribute", f"^({value}.* of float|scale = {value})",
             "bfloat16")
        for value in ("0.333", "0.37796", "0.3570")
    ),
    # One query of few heads has too few elements to show it among roundings to bfloat16.
    Line("i", "softmax sum", "1e-3: ", "bfloat16", 1, DECODE),
    Line("i", "softmax sum", count=2),
    Line("j", "another constant|another attribute", "^(0.7071.* of float|scale = 0.7071)"),
    Line("j", "bias dropped", "zeros: "),
    Line("j", "weight transposed"),
    Line("j", "heads in another order"),
    Line("j", "heads in another order", "shared in turn", "in-place"),
    Line("j", "k and v swapped"),
    Line("j", "another attribute", "is_causal = 0", count=2),
    Line("j", "another operator", "Less for LessOrEqual", count=2),
    Line("j", "softmax over another axis", count=2),
    Line("j", "lengths of one row", "", "in-place"),
    Line("j", "inputs swapped", "Attention/Concat", count=2),
    Line("j", "last key of the cache|cache in reverse|cache of one row", "present_"),
    Line("j", "present key and value swapped"),
    Line("j", "mask ignored|mask inverted|mask shifted|mask of one row"),
    Line("j", "mask of one (head|query)|finite mask lost", "", "mha", 3),
    Line("j", "mean of the batch added", f": ({PROJECTED}|{ATTENDED}) "),
    Line("j", "one weight", "_proj.weight"),
)  # fmt: skip


@functools.cache
def trials_of(bundle: str) -> Trials:
    """Return the graphs of a bundle, which is built once."""
    if bundle in shared.BUNDLES and bundle not in OWN_BUNDLES:
        return Trials(bundle, shared.bundle_of(bundle), shared.spec_of(bundle))
    return Trials(bundle, shared.passed_bundle(spec_of(bundle)), spec_of(bundle))


def mutants_of(line: Line, file: str) -> list[Mutant]:
    """Return the mutants of a line in a graph."""
    if file == line.without:
        return []
    return [
        mutant
        for mutant in trials_of(line.bundle).mutants(file)
        if re.search(line.kind, mutant.kind) and re.search(line.place, mutant.what)
    ]


@pytest.mark.parametrize("line", TABLE, ids=lambda line: f"{line.row}-{line.kind}-{line.place}")
@pytest.mark.every(16)
def test_faults_of_a_line_are_caught_in_every_graph_that_has_the_place(line: Line, tmp_path: Path):
    trials = trials_of(line.bundle)
    found = {file: mutants_of(line, file) for file in FILES[line.bundle]}
    assert sum(bool(mutants) for mutants in found.values()) == line.count
    fates = {
        f"{file}: {mutant.what}": trials.judged(file, trials.changed(file, mutant), tmp_path)
        for file, mutants in found.items()
        for mutant in mutants[:: max(len(mutants) // MOST, 1)]
    }
    assert [what for what, (fate, _) in fates.items() if fate != "caught"] == []


@pytest.mark.parametrize(("bundle", "file"), [("mqa", "model.onnx"), ("mha", "model.ort.onnx")])
def test_a_graph_without_a_fault_passes(bundle: str, file: str, tmp_path: Path):
    trials = trials_of(bundle)
    assert trials.judged(file, trials.models[file], tmp_path) == ("missed", "")
