"""The judge raises no false alarm: a correct runtime passes for any inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy_attention
import pytest
from conftest import small_spec

from attn_export.cases.draw import add_sums, draw_inputs
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.save import save_graph
from attn_export.judge.judge import judge
from attn_export.reference.oracle import Oracle
from attn_export.results import Arrays, Case, Verdict
from attn_export.runtimes.engines.ort_cpu import OrtCpu

pytestmark = pytest.mark.xdist_group("test_clean_runs")  # what it makes is shared

# Every spec has weights of its own seed: that many draws of weights are tried, too.
SPECS = {
    "gqa_causal_cache_bool_mask": small_spec(),
    "mqa_cross_bool_mask": small_spec(
        num_kv_heads=1, cross=True, kdim=24, vdim=20, causal=False, cache="none",
        attn_mask="bool[B,1,L,S]",
    ),
    "packed_dynamic_position_ids_added_keys": small_spec(
        packed_qkv=True, rotary="half", rotary_scaling="dynamic", rotary_factor=4.0,
        rotary_original_len=32, position_ids=True, add_bias_kv=True, add_zero_attn=True,
    ),
    "in_place_rotary": small_spec(cache="in-place", rotary="half"),
}  # fmt: skip
SCALES = (0.02, 1.0, 8.0)
ALL_SEEDS, ONE_SEED = range(4), range(1)
SHAPES = (  # B, L, P, S of cross-attention
    (1, 1, 0, 1), (1, 1, 32, 33), (1, 33, 0, 33), (2, 1, 7, 9), (2, 5, 7, 9), (3, 2, 3, 7),
    (1, 17, 0, 2), (5, 3, 2, 11), (2, 9, 16, 5), (1, 4, 29, 65), (1, 48, 1, 1), (2, 2, 62, 64),
)  # fmt: skip
"""Small and sharp ones among them: one query and 33 keys has few numbers to average over."""


def cases(subject: Subject, seeds: range) -> Iterator[Case]:
    """Yield every shape at every scale of the inputs, from each seed."""
    for (B, L, P, S), scale, seed in itertools.product(SHAPES, SCALES, seeds):
        sizes = add_sums({"batch": B, "query_len": L, "past_len": P, "key_len": S}, subject.sums)
        name = f"B{B}_L{L}_P{P}_S{S}_scale{scale:g}_seed{seed}"
        drawn = draw_inputs(subject.input_descriptions(), sizes, seed_words=("clean", name))
        inputs = {
            name: array
            if name in ("attn_mask", "position_ids", "past_length")
            else array * np.float32(scale)
            for name, array in drawn.items()
        }
        yield Case(name, "shape", sizes, inputs, "random inputs")


@dataclasses.dataclass(frozen=True)
class CleanRun:
    """Verdicts on one runtime in one case."""

    runtime: str
    case: str
    verdicts: list[Verdict]

    def alarm(self) -> str:
        """Return the problems as text; empty if there are none."""
        wrong = [v for v in self.verdicts if v.status != "passed"]
        lines = (f"{v.output} {v.status}, worst {v.worst}: {v.message}" for v in wrong)
        return "; ".join(f"{self.runtime} {self.case}: {line}" for line in lines)


@pytest.fixture(scope="module")
def clean_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[CleanRun]:
    """Return all cases of all specs, in ONNX Runtime and in numpy; with `--all` of all seeds."""
    seeds = ALL_SEEDS if request.config.getoption("--all") else ONE_SEED
    found: list[CleanRun] = []
    for seed, (name, spec) in enumerate(SPECS.items()):
        subject = Subject.from_spec(spec, seed=seed)
        graph = tmp_path_factory.mktemp(name) / "model.onnx"
        save_graph(export(subject).model, graph)
        parameters = {n: tensor.numpy() for n, tensor in subject.module.state_dict().items()}
        runtimes: dict[str, Callable[[Arrays], Arrays]] = {
            "onnxruntime": functools.partial(OrtCpu().load(graph, threads=1).run, bound={}),
            "numpy": functools.partial(numpy_attention.run, spec, parameters),
        }
        oracle = Oracle(subject)
        for case in cases(subject, seeds):
            golden = oracle.golden(case)
            for runtime, run in runtimes.items():
                verdicts = judge(runtime, graph.name, golden, run(case.inputs))
                found.append(CleanRun(runtime, f"{name} {case.name}", verdicts))
    return found


@pytest.mark.parametrize("runtime", ["onnxruntime", "numpy"])
def test_hundreds_of_clean_runs_raise_no_false_alarm(clean_runs, runtime):
    of_runtime = [run for run in clean_runs if run.runtime == runtime]
    assert len({run.case for run in of_runtime}) >= 140
    assert all(run.verdicts for run in of_runtime)
    alarms = [run.alarm() for run in of_runtime if run.alarm()]
    assert not alarms, f"{len(alarms)} of {len(of_runtime)} clean runs:\n" + "\n".join(alarms)


def test_clean_runs_are_measured_and_not_waved_through(clean_runs):
    """Check that errors are there, and small: a rule that passes everything also passes these."""
    worst = [v.worst for run in clean_runs for v in run.verdicts]
    assert None not in worst
    assert 0 < np.median(worst) < 0.5
