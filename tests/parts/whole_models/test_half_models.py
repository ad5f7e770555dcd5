"""Whole models in float16 and bfloat16, and their graphs for CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from tiny_decoders import tiny_decoder
from tiny_encoders import tiny_encoder
from tiny_pairs import tiny_pair

from attn_export import DecodeSession, Subject, build
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.compare import compare_models
from attn_export.errors import ExportError, UsageError
from attn_export.export.export import export
from attn_export.graph.save import save_graphs
from attn_export.measures import measure
from attn_export.parts.cuda_dry_run.dry_run import dry_run
from attn_export.parts.cuda_dry_run.dry_run_results import Step
from attn_export.results import Report
from attn_export.runtimes.run_options import RunOptions

WIDE: dict[str, Any] = {"head_dim": 64, "hidden_size": 64}
"""Heads of a width that CUDA's kernels for one query take."""

pytestmark = pytest.mark.xdist_group("test_half_models")  # what it exports is shared

PROMPT = [[5, 9, 33, 7, 21, 8]]


def half(kind: str, folder: Path, dtype: str = "float16", **fields: Any) -> Report:
    """Build a tiny decoder in a narrow type."""
    model = tiny_decoder(kind, **fields)
    return build(Subject.from_model(model, dtype=dtype), folder, runtimes=["ort-cpu"])


def generated(model: Any, count: int) -> list[int]:
    """Return the greedy tokens of transformers in float16."""
    with torch.inference_mode():
        tokens = model.half().generate(
            torch.tensor(PROMPT), attention_mask=torch.ones(1, 6, dtype=torch.int64),
            do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return tokens[0, 6:].tolist()


def decoded(folder: Path, count: int) -> list[int]:
    tokens = DecodeSession(folder).generate(np.array(PROMPT), count)
    return np.stack(list(tokens), 1)[0].tolist()


def cuda_graphs(kind: str, folder: Path, **fields: Any) -> Subject:
    """Write the standard graph of a tiny decoder, and those for CUDA."""
    subject = Subject.from_model(tiny_decoder(kind, **WIDE, **fields), dtype="float16")
    graphs, _ = lower_all(export(subject), ("standard", "cuda"))
    save_graphs({graph.file.name: graph.model for graph in graphs}, folder)
    return subject


def step_of(graph: Path) -> Step:
    """Return a dry run of one query."""
    (seen,) = dry_run(graph, architectures=["sm_90"], query_len=1, past_len=20)
    (step,) = seen.steps
    assert (step.copied, step.waits, step.stopped, seen.problem) == (0, (), "", "")
    return step


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Subject]:
    folder = tmp_path_factory.mktemp("half")
    return folder, cuda_graphs("llama", folder)


def test_weights_are_narrow_and_what_transformers_computes_is_not(llama):
    stored = onnx.load(llama[0] / "model.onnx").graph.initializer
    assert {x.data_type for x in stored if x.name.endswith(".weight")} == {TensorProto.FLOAT16}
    (frequencies,) = (x for x in stored if x.name.endswith("inv_freq"))
    assert frequencies.data_type == TensorProto.FLOAT
    assert llama[1].notes == ("the model is float32, and built in float16",)


def test_a_step_is_that_of_the_model_in_float64(llama):
    folder, subject = llama
    case = next(each for each in subject.plan().cases if each.sizes["query_len"] == 1)
    golden = subject.oracle(0.0).golden(case)
    int32 = {**case.inputs, "past_length": case.inputs["past_length"].astype(np.int32)}
    for name, inputs in (("model.onnx", case.inputs), ("model.cuda.decode.onnx", int32)):
        (logits,) = onnxruntime.InferenceSession(folder / name).run(["logits"], inputs)
        assert logits.dtype == np.float16
        reference = golden.expected["logits"].astype(np.float64)
        assert measure(logits, reference).row <= golden.tolerance["logits"].row


def test_a_step_on_cuda_takes_eleven_launches_in_a_layer(llama, need_dry_run):
    nodes = [node.op_type for node in onnx.load(llama[0] / "model.cuda.decode.onnx").graph.node]
    assert nodes.count("GroupQueryAttention") == nodes.count("GatedRMSNorm") == 2
    assert nodes.count("SkipSimplifiedLayerNormalization") == 4
    events = step_of(llama[0] / "model.cuda.decode.onnx").events
    launched = [event for event in events if event.kind in ("launch", "library")]
    assert sum("layers.1" in event.node for event in launched) == 11


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_two_more_layers_take_as_many_launches(kind, tmp_path, need_dry_run):
    launches = []
    for layers in (2, 4):
        folder = tmp_path / str(layers)
        folder.mkdir()
        cuda_graphs(kind, folder, num_hidden_layers=layers)
        launches.append(step_of(folder / "model.cuda.decode.onnx").launches)
    assert launches[1] - launches[0] == 2 * 11


def test_what_float16_does_not_hold_is_refused():
    model = tiny_decoder("llama", num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight *= 2e5
        mlp.up_proj.weight *= 2e5
    with pytest.raises(ExportError, match="llama overflows in float16; give another dtype"):
        Subject.from_model(model, dtype="float16")
    with torch.no_grad():
        mlp.up_proj.weight *= 1e3
    with pytest.raises(UsageError, match=r"up_proj.weight has values that float16 does not hold"):
        Subject.from_model(model, dtype="float16")


def test_integers_and_other_types_beside_float16_are_refused():
    model = tiny_decoder("llama", num_hidden_layers=1)
    with pytest.raises(UsageError, match="dtype of a whole model is float32, float16, bfloat16;"):
        Subject.from_model(model, dtype="float64")
    for name, value in (("weights_dtype", "int4"), ("kv_dtype", "float16")):
        with pytest.raises(UsageError, match=f"{name} {value} is for float32, not for dtype bfl"):
            Subject.from_model(model, dtype="bfloat16", **{name: value})


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "gpt2"])
def test_a_decoder_in_bfloat16_stores_all_weights_in_it(kind, tmp_path):
    assert half(kind, tmp_path / "b", "bfloat16").passed
    weights = sum(x.numel() for x in set(tiny_decoder(kind).parameters()))
    stored = {x.name: x for x in onnx.load(tmp_path / "b/model.onnx").graph.initializer}
    wide = sum(np.prod(x.dims) for x in stored.values() if x.data_type == TensorProto.FLOAT)
    assert wide < weights / 50
    run = RunOptions.of(runtimes=["ort-cpu"])  # has no kernels of model.cuda.onnx in bfloat16
    assert compare_models(tiny_decoder(kind), tmp_path / "b", run).passed


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "glm", "mistral"],
)
def test_decoders_are_built_in_float16(kind, tmp_path):
    report = half(kind, tmp_path / "b")
    assert report.passed
    assert {"in float32", "model.cuda.onnx"} <= {v.graph for v in report.verdicts}
    assert (tmp_path / "b/model.cuda.decode.onnx").is_file()
    if kind == "llama":  # those of other types may have ties
        assert decoded(tmp_path / "b", 8) == generated(tiny_decoder(kind), 8)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "kind"), [(tiny_encoder, "bert"), (tiny_encoder, "vit"), (tiny_pair, "whisper")]
)
def test_encoders_are_built_in_float16(make, kind, tmp_path):
    subject = Subject.from_model(make(kind), dtype="float16")
    assert build(subject, tmp_path / "b", runtimes=["ort-cpu"]).passed
