"""Long and sharp inputs: 8192 keys and logits up to ±40 stay within the judge's bound.

Legend: B batch, H query heads, L query length, P past length, S = P + L keys.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from attn_export import AttentionSpec, Subject
from attn_export.attention import module as attention_module
from attn_export.cases.draw import add_sums, draw_inputs
from attn_export.export.export import export
from attn_export.graph.checks import check_graph
from attn_export.graph.save import save_graph
from attn_export.judge.judge import judge
from attn_export.results import Arrays, Case, Golden, Verdict
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.runtimes.protocol import Engine
from attn_export.truth.oracle import Oracle

pytestmark = pytest.mark.xdist_group("test_long_and_sharp")  # what it makes is shared

S = 8192
SHARP = 40.0
SPECS = {
    "plain": {},
    "rotary_with_a_mask": {"rotary": "half", "attn_mask": "bool[B,1,1,S]"},
}
ERROR_OF_FEW_BITS = {"float16": (1e-3, 0.12), "bfloat16": (1e-3, 0.01)}
"""Between what the error allowed for the output must be: an output of zeros has 1. A graph of
bfloat16 computes in float32."""

LARGEST = 2e-3
"""The same in float32. Angles of 8191 radians are rounded by 5e-4."""

lengths = pytest.mark.parametrize("L", [1, 4])
specs = pytest.mark.parametrize("name", SPECS)


@dataclasses.dataclass(frozen=True)
class Built:
    """A subject and its graph, loaded."""

    subject: Subject
    engine: Engine

    def judged(self, case: Case) -> tuple[Golden, list[Verdict]]:
        golden = Oracle(self.subject).golden(case)
        return golden, judge("ort-cpu", "model.onnx", golden, self.engine.run(case.inputs, {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@functools.cache
def built(name: str, folder: Path, dtype: str = "float32") -> Built:
    """Export and load an MQA of E 16, H 2, D 8."""
    spec = AttentionSpec(
        embed_dim=16, num_heads=2, num_kv_heads=1, causal=True, cache="append", dtype=dtype,
        **SPECS[name],
    )  # fmt: skip
    subject, graph = Subject.from_spec(spec), folder / f"{name}_{dtype}.onnx"
    save_graph(export(subject).model, graph)
    assert check_graph(graph, subject.expected()) == []
    return Built(subject, OrtCpu().load(graph, threads=1))


def logits(subject: Subject, inputs: Arrays) -> np.ndarray:
    """Return the module's own scores of past keys that its queries see."""
    found: list[torch.Tensor] = []
    attend = attention_module.scaled_dot_product_attention

    def recording(q, k, v, attn_mask, *, scale, **options):
        found.append(scale * q.double() @ k.double().transpose(-1, -2))  # [B, H, L, S]
        return attend(q, k, v, attn_mask, scale=scale, **options)

    oracle = Oracle(subject)
    with patch.object(attention_module, "scaled_dot_product_attention", recording):
        oracle.eager(inputs)
    (scores,) = found
    P = inputs["past_key"].shape[2]
    visible = np.broadcast_to(inputs.get("attn_mask", np.True_), scores.shape)
    return scores.numpy()[..., :P][visible[..., :P]]


def sharp_case(subject: Subject, L: int) -> Case:
    """Return a case of S keys, with past keys so large that the logits reach ±40."""
    sizes = add_sums({"batch": 1, "query_len": L, "past_len": S - L}, subject.relations)
    inputs = draw_inputs(subject.input_descriptions(), sizes, seed_words=("long and sharp", L))
    drawn, past = logits(subject, inputs), inputs["past_key"]
    reach = min(drawn.max(), -drawn.min())
    inputs["past_key"] = (past.astype(np.float64) * (SHARP / reach)).astype(past.dtype)
    return Case(f"S{S}_L{L}", "shape", sizes, inputs, "long and sharp")


def assert_reaches(subject: Subject, case: Case, error: float) -> None:
    found = logits(subject, case.inputs)
    assert min(found.max(), -found.min()) == pytest.approx(SHARP, rel=error)
    assert case.inputs["past_key"].shape[2] + case.inputs["query"].shape[1] == S


def assert_passed(verdicts: list[Verdict]) -> None:
    assert [v.output for v in verdicts] == ["output", "present_key", "present_value"]
    assert {v.status for v in verdicts} == {"passed"}, verdicts


@lengths
@specs
def test_long_and_sharp_inputs_pass_within_a_bound_that_means_something(name, L, folder):
    made = built(name, folder)
    case = sharp_case(made.subject, L)
    assert_reaches(made.subject, case, 1e-5)
    golden, verdicts = made.judged(case)
    assert_passed(verdicts)
    assert all(allowed.whole < LARGEST for allowed in golden.allowed.values())


@lengths
@pytest.mark.parametrize("dtype", ERROR_OF_FEW_BITS)
@pytest.mark.every(3)
def test_in_few_bits_the_bound_is_wider_and_holds(dtype, L, folder):
    made = built("rotary_with_a_mask", folder, dtype)
    case = sharp_case(made.subject, L)
    assert_reaches(made.subject, case, 1e-2)
    golden, verdicts = made.judged(case)
    assert_passed(verdicts)
    least, most = ERROR_OF_FEW_BITS[dtype]
    assert least < golden.allowed["output"].whole < most


@lengths
def test_half_precision_is_outside_the_bound_of_float32(L, folder):
    made = built("rotary_with_a_mask", folder)
    golden, _ = made.judged(sharp_case(made.subject, L))
    few = built("rotary_with_a_mask", folder, "float16")
    inputs = {
        name: array.astype(np.float16) if array.dtype == np.float32 else array
        for name, array in golden.case.inputs.items()
    }
    outputs = {name: array.astype(np.float32) for name, array in few.engine.run(inputs, {}).items()}
    assert {v.status for v in judge("ort-cpu", "few bits", golden, outputs)} == {"failed"}
