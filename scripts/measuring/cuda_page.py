"""docs/results/cuda.md: parity, kernels and times on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attn_export.report.tables import markdown_table, shown

OURS, THEIRS = ("ours", "ours, captured"), ("torch", "torch, captured")


def cuda_page(results: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        results: The results of `scripts/gpu_check`: card, environment, parity, kernels, times.
    """
    lines = [
        "# ort-cuda against torch", "",
        f"{results['card']}; TF32 off on both sides.",
        *_parity(results["parity"]),
        *_kernels(results["kernels"]),
        *_times(results["times"], _OF_LAYERS),
        *_whole(results.get("whole", [])),
        *_whole_kernels(results.get("whole_kernels", [])),
        *_times(results.get("whole_times", []), _OF_MODELS),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _parity(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "", "## Numbers", "",
        "Errors are shares of what the judge allows (1 = limit).", "",
    )  # fmt: skip
    heads = (
        "model", "passed", "cases", "ort-cuda", "torch GPU", "max abs to torch GPU", "to torch CPU",
    )  # fmt: skip
    yield from markdown_table(heads, map(_figures, rows))


def _figures(row: dict[str, Any]) -> tuple[object, ...]:
    if "error" in row:
        return row["model"], f"**no**: {row['error']}", *[""] * 5
    shares = (shown(row[name], ".3f") for name in ("worst", "worst_torch"))
    differences = (
        shown(row[name], ".1e") for name in ("max_abs_to_torch_device", "max_abs_to_torch_cpu")
    )
    passed = "yes" if row["passed"] else "**no**"
    return row["model"], passed, row["cases"], *shares, *differences


def _kernels(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "", "## Kernels", "",
        "ONNX Runtime's own kernels in the `cuda` graphs, float16 unless named, against those that "
        "the dry run named for the architecture (cuda_forms.json); both without cuDNN's attention. "
        "By default ONNX Runtime prefers it from sm_90 on. cuda.json lists all.", "",
    )  # fmt: skip
    yield from markdown_table(
        ("model", "step", "kernels", "as in the dry run", "cuDNN's by default"),
        (
            (
                row["model"], row["step"], len(row.get("kernels", ())),
                row.get("error") or ("yes" if row["same"] else "**no**"),
                "yes" if any("cudnn" in name for name in row.get("by_default", ())) else "no",
            )
            for row in rows
        ),
    )  # fmt: skip


_OF_LAYERS = (
    "", "## Times", "",
    "A layer with its projections, float16 unless named, in ms: medians of interleaved rounds, "
    "each run waited for. Torch is scaled_dot_product_attention with a static cache. The ratio "
    "is the best of ours to the best of torch's.", "",
)  # fmt: skip
_OF_MODELS = (
    "", "In ms, as above. Torch is transformers' model, not compiled, by "
    "scaled_dot_product_attention with its static cache of 1,024 slots, to all of which it "
    "attends; its steps of gemma3 cannot be captured. Decode: one token after 1,023; prefill: 512 "
    "tokens, in torch without a cache.", "",
)  # fmt: skip


def _times(rows: list[dict[str, Any]], head: Sequence[str]) -> Iterator[str]:
    names = (*OURS, *THEIRS)
    if not rows:
        return
    yield from head
    cells = []
    for row in rows:
        if "error" in row:
            rest = [f"**not run**: {row['error']}", *[""] * len(names)]
        else:
            rest = [shown(row["ms"].get(name), ".3f") for name in names]
            rest.append(shown(row.get("ratio"), ".2f"))
        cells.append((row["model"], row["step"], *rest))
    yield from markdown_table(("model", "step", *names, "ratio"), cells)


def _whole(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "", "## Whole models", "",
        "Decoders with random weights, built by `gpu_check --prepare`: 2 layers, 512 wide, heads "
        "of 64 (llama) or 128. `qwen3-0.6b` and `llama-3.2-1b` have all layers, widths and the "
        "vocabulary of their names, but are not judged. The verdicts are those of "
        "`verify` on `ort-cuda`; errors are shares of what the judge allows. Graphs of `ort` for "
        "whose operators CUDA has no kernel in float32 are not run.", "",
        "Graphs of `cuda` in bfloat16 compute in it, and may be four times as wrong as the module "
        "in bfloat16 is itself.", "",
    )  # fmt: skip
    yield from markdown_table(
        ("model", "graph", "passed", "of", "error"),
        (
            (row["model"], row["step"], f"**no**: {row['error']}", "", "") if "error" in row else
            (
                row["model"], row["step"], row["right"] if row["passed"] else f"**{row['right']}**",
                row["outputs"], shown(row["worst"], ".3f"),
            )
            for row in rows
        ),
    )  # fmt: skip


def _whole_kernels(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield from (
        "", "Launches of the `cuda` graphs with those of cuBLAS. A dry run counts calls of cuBLAS: "
        "when the two large models decode, it splits a product of each layer, and launches a "
        "second kernel that adds the parts. Decoding sets memory, but copies nothing from or to "
        "the host.", "",
    )  # fmt: skip
    yield from markdown_table(
        (
            "model", "step", "launches", "in the dry run", "ORT's own", "as in the dry run",
            "set, copied",
        ),
        (
            (row["model"], row["step"], f"**not run**: {row['error']}", *[""] * 4)
            if "error" in row else
            (
                row["model"], row["step"], row["launches"], row["dry_run_launches"],
                len(row["kernels"]), "yes" if row["same"] else "**no**", len(row["copies"]),
            )
            for row in rows
        ),
    )  # fmt: skip
