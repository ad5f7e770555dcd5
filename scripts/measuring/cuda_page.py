"""docs/results/cuda.md: parity, kernels and times on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attn_export.report.matrix import shown

OURS, THEIRS = ("ours", "ours, captured"), ("torch", "torch, captured")


def cuda_page(results: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        results: The results of `scripts/gpu_check`: card, environment, parity, kernels, times.
    """
    versions = results["environment"]["versions"]
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# ort-cuda against torch", "",
        f"{results['card']}; TF32 off on both sides; {made_with}.",
        "Written by `scripts/gpu_check`.",
        *_parity(results["parity"]),
        *_kernels(results["kernels"]),
        *_times(results["times"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _parity(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "", "## Numbers", "",
        "Errors are shares of what the judge allows (1 = limit).", "",
        "| model | passed | cases | ort-cuda | torch GPU | max abs to torch GPU | to torch CPU |",
        "|---|---|---|---|---|---|---|",
    )  # fmt: skip
    for row in rows:
        if "error" in row:
            yield f"| {row['model']} | **no**: {row['error']} | | | | | |"
            continue
        yield (
            f"| {row['model']} | {'yes' if row['passed'] else '**no**'} | {row['cases']} "
            f"| {shown(row['worst'], '.3f')} | {shown(row['worst_torch'], '.3f')} "
            f"| {shown(row['max_abs_to_torch_device'], '.1e')} "
            f"| {shown(row['max_abs_to_torch_cpu'], '.1e')} |"
        )


def _kernels(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "", "## Kernels", "",
        "ONNX Runtime's own kernels in the `cuda` graphs, float16 unless named, against those that "
        "the dry run named for the architecture (cuda_forms.json). cuda.json lists them.", "",
        "| model | step | kernels | as in the dry run |",
        "|---|---|---|---|",
    )  # fmt: skip
    for row in rows:
        said = row.get("error") or ("yes" if row["same"] else "**no**")
        yield f"| {row['model']} | {row['step']} | {len(row.get('kernels', ()))} | {said} |"


def _times(rows: list[dict[str, Any]]) -> Iterator[str]:
    names = (*OURS, *THEIRS)
    yield from (
        "", "## Times", "",
        "A layer with its projections, float16 unless named, in ms: medians of interleaved rounds, "
        "each run waited for. Torch is scaled_dot_product_attention with a static cache. The ratio "
        "is the best of ours to the best of torch's.", "",
        f"| model | step | {' | '.join(names)} | ratio |",
        "|---|---|---|---|---|---|---|",
    )  # fmt: skip
    for row in rows:
        if "error" in row:
            yield f"| {row['model']} | {row['step']} | **not run**: {row['error']} | | | | |"
            continue
        found = row["ms"]
        cells = " | ".join(shown(found.get(name), ".3f") for name in names)
        yield f"| {row['model']} | {row['step']} | {cells} | {shown(row.get('ratio'), '.2f')} |"
