"""`attn-export lower`: rewrite the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from attn_export.commands.fixed_graphs import fixed_graphs
from attn_export.commands.options import fix_input_option, option, with_help
from attn_export.commands.output import echo
from attn_export.dialect_names import check_dialects
from attn_export.errors import PARAGRAPH, UsageError, printable
from attn_export.output_folder import check_utf8
from attn_export.runtimes.child import limited


@with_help(
    "Build and ship", "lower model.onnx --dialect portable -o portable.onnx",
    "lower model.onnx --dialect ort -o fast.onnx --fix-input use_cache_branch=1",
)  # fmt: skip
@option("model", metavar="MODEL.onnx", type=Path)
@option("--dialect", required=True, metavar="NAME", help="standard, portable, ort.")
@option("-o", "--output", required=True, type=Path, metavar="OUT.onnx", help="The file to write.")
@fix_input_option
def lower_command(model: Path, dialect: str, output: Path, fixed: dict[str, str]) -> int:
    """Rewrite the Attention nodes of any ONNX file, and attention that is written out.

    standard: ai.onnx Attention, opset 23 or 24. portable: opset 18, without Attention, for
    runtimes that have no such operator. ort: the fastest forms in ONNX Runtime; with a KV cache,
    a graph for one query a step goes to OUT.decode.onnx.
    """
    if fixed and output.exists() and model.exists() and output.samefile(model):
        raise UsageError(f"{output} is the file to read; choose another --output")
    with fixed_graphs([model], fixed) as (graph,):
        lowered = lower_file(graph, output, dialect)
    if lowered.note:
        echo(printable(f"{model}: {lowered.note}"))
    for path, counts in lowered.operators.items():
        text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        echo(printable(f"{path}: {dialect}: {text}", PARAGRAPH))
    return 0


@dataclasses.dataclass(frozen=True)
class LoweredFiles:
    """Files in a dialect.

    Attributes:
        operators: The number of nodes of each operator, for every written file.
        note: A sentence on what was recognised in the source; "" if it has `Attention` nodes alone.
    """

    operators: Mapping[Path, Mapping[str, int]]
    note: str


def lower_file(model: Path | str, output: Path | str, dialect: str) -> LoweredFiles:
    """Lower a graph to a dialect, in a child process.

    If `output` is in the folder of `model`, both share the external data; else it is copied. In the
    dialect ``ort``, a graph with a KV cache gets a second graph for single queries.
    """
    check_utf8(Path(output))
    check_dialects([dialect])
    found = limited(
        f"{__package__}.lower_here:lower_here", str(model),
        model=str(model), output=str(output), dialect=dialect,
    )  # fmt: skip
    operators = {Path(path): counts for path, counts in found["operators"].items()}
    return LoweredFiles(operators, found["note"])
