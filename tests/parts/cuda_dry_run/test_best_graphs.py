"""The graph that serves an architecture best, by what dry runs counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import small_spec

from attn_export.commands.bundle_graphs import lower_all
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.save import save_graphs
from attn_export.parts.cuda_dry_run.dry_run import observe
from attn_export.parts.cuda_dry_run.dry_run_report import best_lines
from attn_export.parts.cuda_dry_run.dry_run_results import (
    Event,
    NodeElsewhere,
    Observation,
    Step,
    architectures_named,
    best_graphs,
)

ON_CPU = NodeElsewhere("node", "GroupQueryAttention", "CPUExecutionProvider", "no kernel", True)
SHAPES = NodeElsewhere("node", "Squeeze", "CPUExecutionProvider", "shapes", False)


def step_of(copied: int, launches: int, name: str = "decode", **fields: Any) -> Step:
    kernels = [Event("launch", "kernel", 0, "node")] * (launches - 1)
    kernels.append(Event("launch", "Ungroup", copied, "node"))
    return Step(name, {}, tuple(kernels), (), {}, fields.pop("waits", ()), **fields)


def graph_of(name: str, *steps: Step, arch: str = "sm_80", **fields: Any) -> Observation:
    return Observation(name, arch, steps=steps, **fields)


FAR = graph_of("far", step_of(9, 99))
RULE: dict[str, tuple[list[Observation], list[tuple[str, str, str, int, int]]]] = {
    "fewer bytes and fewer launches": (
        [graph_of("a", step_of(8, 21)), graph_of("b", step_of(0, 20))],
        [("sm_80", "decode", "b", 0, 20)],
    ),
    "fewer bytes or fewer launches": (
        [graph_of("a", step_of(0, 20)), graph_of("b", step_of(8, 2)), graph_of("c", step_of(8, 3))],
        [("sm_80", "decode", "b", 8, 2), ("sm_80", "decode", "a", 0, 20)],
    ),
    "fewer launches of equal bytes": (
        [graph_of("a", step_of(4, 9)), graph_of("b", step_of(4, 8)), graph_of("c", step_of(4, 10))],
        [("sm_80", "decode", "b", 4, 8)],
    ),
    "the first of equals": (
        [graph_of("a", step_of(1, 9)), graph_of("b", step_of(1, 9))],
        [("sm_80", "decode", "a", 1, 9)],
    ),
    "refused": ([graph_of("a", refused="no kernel"), FAR], [("sm_80", "decode", "far", 9, 99)]),
    "attention on the CPU": (
        [graph_of("a", step_of(0, 1), elsewhere=(ON_CPU,)), FAR],
        [("sm_80", "decode", "far", 9, 99)],
    ),
    "shapes on the CPU": (
        [graph_of("a", step_of(0, 1), elsewhere=(SHAPES,)), FAR],
        [("sm_80", "decode", "a", 0, 1)],
    ),
    "stopped at cuDNN": (
        [graph_of("a", step_of(0, 1, stopped="it ended", finding="this kernel is cuDNN's")), FAR],
        [("sm_80", "decode", "far", 9, 99)],
    ),
    "a number that is not known": (
        [graph_of("a", step_of(0, 1, waits=("Memcpy",))), FAR],
        [("sm_80", "decode", "far", 9, 99)],
    ),
    "each step and architecture": (
        [
            graph_of("a", step_of(0, 5, "prefill"), step_of(0, 6)), graph_of("b", step_of(0, 4)),
            graph_of("a", step_of(0, 7, "prefill"), step_of(2, 6), arch="sm_75"),
            graph_of("b", step_of(3, 4), arch="sm_75"),
        ],
        [
            ("sm_80", "prefill", "a", 0, 5), ("sm_80", "decode", "b", 0, 4),
            ("sm_75", "prefill", "a", 0, 7), ("sm_75", "decode", "b", 3, 4),
            ("sm_75", "decode", "a", 2, 6),
        ],
    ),
    "none that runs": ([graph_of("a", refused="x"), graph_of("b", refused="x")], []),
    "one graph": ([FAR], []),
}  # fmt: skip


@pytest.mark.parametrize("name", RULE)
def test_no_other_graph_copies_and_launches_as_little(name: str):
    observations, wanted = RULE[name]
    found = best_graphs(observations)
    fields = ("architecture", "step", "graph", "cache_bytes", "launches")
    assert [tuple(getattr(best, field) for field in fields) for best in found] == wanted
    assert len(best_lines(observations)) == len({place[:2] for place in wanted})


def test_the_problem_of_a_graph_is_its_first_error():
    steps = [step_of(0, 1, name, stopped=f"{name} ended") for name in ("prefill", "decode")]
    assert graph_of("a", step_of(0, 1), *steps).problem == "prefill ended"


@pytest.mark.usefixtures("need_dry_run")
def test_shared_heads_are_best_left_as_they_are_before_sm_80(tmp_path: Path):
    spec = small_spec(
        embed_dim=256, num_kv_heads=2, bias=False, rotary="half", cache="in-place",
        attn_mask="none", dtype="float16",
    )  # fmt: skip
    graphs, _ = lower_all(export(Subject.from_spec(spec)), ("standard", "ort", "cuda"))
    save_graphs({graph.file.name: graph.model for graph in graphs}, tmp_path)
    seen = [
        observe(tmp_path, graph.file, card, (1, None, None))
        for graph in graphs if "decode" in graph.file.name
        for card in architectures_named(["sm_75", "sm_80"])
    ]  # fmt: skip
    found = {(best.architecture, best.graph): best for best in best_graphs(seen)}
    assert list(found) == [
        ("sm_75", "model.cuda.decode.onnx"), ("sm_75", "model.ort.decode.onnx"),
        ("sm_80", "model.cuda.decode.onnx"),
    ]  # fmt: skip
    few, none, new = found.values()
    # Keys and values of 1024 places, 4 heads and 64 channels, 2 bytes each.
    assert (few.cache_bytes, none.cache_bytes, new.cache_bytes) == (2 * 1024 * 4 * 64 * 2, 0, 0)
    assert new.launches <= few.launches < none.launches
    (line,) = [line for line in best_lines(seen) if "sm_75 T4, decode" in line]
    assert "1 MiB of keys and values copied; or model.ort.decode.onnx" in line
