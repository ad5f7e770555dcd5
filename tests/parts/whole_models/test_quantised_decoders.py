"""Decoders that are built with weights of integers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from native_kits import compile_kit
from onnx import numpy_helper
from shared import extended, once
from tiny_decoders import tiny_decoder
from tiny_pairs import tiny_pair

from attn_export import Subject, build, verify
from attn_export.bundle.manifest import manifest_content, read_manifest, write_manifest
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.check import check
from attn_export.commands.compare import compare_models
from attn_export.errors import BundleError, ExportError, UsageError, WeightsError
from attn_export.export.export import export
from attn_export.parts.installing import home
from attn_export.parts.kits.kit import write_kit
from attn_export.runtimes.run_options import RunOptions

NBITS = "MatMulNBits"


SELF_TEST = {
    "c": ["build/self_test"],
    "node": ["node", "src/self_test.mjs"],
    "python": [sys.executable, "-W", "error", "-m", "attn_kit.self_test"],
}
RUN = {"runtimes": ["ort-cpu"]}


def test_weights_are_stored_as_integers_and_judged_twice(tmp_path):
    model = tiny_decoder("llama", num_hidden_layers=1)
    before = [parameter.clone() for parameter in model.parameters()]
    subject = Subject.from_model(model, weights_dtype="int4", max_len=16, accuracy_level=1)
    report = build(subject, tmp_path / "out", dialects=("ort",), **RUN)
    assert {run.graph for run in report.runs} == {"model.ort.onnx", "model.ort.decode.onnx"}
    assert report.passed
    assert all(map(torch.equal, model.parameters(), before))  # the user's model
    graph = onnx.load(tmp_path / "out/model.ort.onnx", load_external_data=False).graph
    products = [node.op_type for node in graph.node if "MatMul" in node.op_type]
    assert products == ["MatMulNBits"] * 5  # q, k and v, the output, gate and up, down, logits
    logits = report.quality.outputs[0]
    assert logits.part == "logits"
    assert 6 < logits.sqnr < 40
    assert [str(budget) for budget in report.quality.budgets] == ["sqnr>=6"]
    assert verify(tmp_path / "out", runtimes=["ort-cpu"]).quality.outputs[0] == logits
    assert not verify(tmp_path / "out", runtimes=["ort-cpu"], budgets=["sqnr>=40"]).passed


# -- products that round their inputs to 8 bits, beside those that do not -------------------------

PAIRS = {
    "model.ort.onnx": "model.ort.level1.onnx",
    "model.ort.decode.onnx": "model.ort.decode-level1.onnx",
}


def rounding(dtype: str) -> Path:
    """Return a bundle with graphs of both kinds."""

    def make(folder: Path) -> None:
        # Inputs of 64 are two blocks.
        model = tiny_decoder("llama", num_hidden_layers=1)
        subject = Subject.from_model(model, weights_dtype=dtype, max_len=16)
        report = build(subject, folder, dialects=("ort",), **RUN)
        assert report.passed, str(report)
        (folder.parent / f"{folder.name}.report").write_text(repr(report.quality.outputs))

    return once(f"models/rounding-{dtype}", make)


def levels(path: Path) -> set[tuple[int, int]]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    given = [{a.name: a.i for a in node.attribute} for node in nodes if node.op_type == NBITS]
    return {(of["bits"], of["accuracy_level"]) for of in given}


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("int8", 8)])
def test_a_graph_that_rounds_inputs_is_judged_beside_one_that_does_not(dtype, bits):
    bundle = rounding(dtype)
    graphs = read_manifest(bundle).graphs
    assert {name: graph.exact for name, graph in graphs.items() if graph.exact} == PAIRS
    assert [graph.name for graph in read_manifest(bundle).shipped] == list(PAIRS)
    for name, exact in PAIRS.items():
        assert levels(bundle / name) == {(bits, 4)}
        assert levels(bundle / exact) == {(bits, 1)}
        assert check(bundle / name) == []
    report = verify(bundle, **RUN)
    assert report.passed
    assert repr(report.quality.outputs) == (bundle.parent / f"{bundle.name}.report").read_text()
    parts = {each.part: each.sqnr for each in report.quality.outputs}
    # The distance of what ships is told beside that of its weights.
    assert 0 < abs(parts["logits in ort-cpu"] - parts["logits"]) < 6
    worst = {
        name: max(v.whole for v in report.verdicts if v.graph == name and v.output == "logits")
        for name in graphs
    }
    for name, exact in PAIRS.items():
        assert worst[exact] < 1e-5 < 1e-3 < worst[name] < 0.03
    assert report.environment["processor"] in " ".join(report.notes)
    # A model whose inputs are rounded gives what kernels do: half of what is allowed.
    shares = [v.worst for v in report.verdicts if v.graph in PAIRS]
    assert 0.4 < max(shares) < 0.75
    assert not verify(bundle, budgets=["sqnr>=60"], **RUN).passed


def scaled(path: Path, output: Path, factor: float) -> Path:
    """Write a graph in which one product is larger by a factor."""
    model = onnx.load(path, load_external_data=False)
    at = next(n for n, node in enumerate(model.graph.node) if node.op_type == NBITS)
    (name,) = model.graph.node[at].output
    model.graph.node[at].output[0] = "small"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
    model.graph.node.insert(at + 1, onnx.helper.make_node("Mul", ["small", "factor"], [name]))
    output.write_bytes(model.SerializeToString())
    return output


def test_faults_at_the_level_that_rounds_inputs_alone_are_found(tmp_path):
    folder = shutil.copytree(rounding("int4"), tmp_path / "bundle")
    # Kernels that are wrong at this level: the same graph, whose products are 2 % too large.
    wrong = scaled(folder / "model.ort.onnx", folder / "wrong.onnx", 1.02)
    wrong = wrong.rename(folder / "model.ort.onnx")
    report = verify(rounding("int4"), graph=wrong, **RUN)
    assert report.exit_code == 6
    assert not report.quality.missed  # the distance from the float model is as before
    # As a bundle of its own, it is none: the graphs differ by more than the level.
    write_manifest(folder, manifest_content(folder))
    with pytest.raises(BundleError, match=r"differs from model.ort.level1.onnx by more than acc"):
        verify(folder, **RUN)
    assert [finding.check for finding in check(wrong)] == ["accuracy_level"]


def test_compare_judges_them_by_their_own_integers_and_by_the_float_model(tmp_path):
    model, run = tiny_decoder("llama", num_hidden_layers=1), RunOptions.of(budgets=["sqnr>=6"])
    bundle = shutil.copytree(rounding("int4"), tmp_path / "bundle")
    report = compare_models(model, bundle, run)
    assert report.passed
    assert report.quality.causes
    # All products with integers are right, and one is then scaled.
    wrong = scaled(bundle / "model.ort.onnx", bundle / "wrong.onnx", 1.02)
    report = compare_models(model, wrong, run)
    assert {v.graph for v in report.failures} == {"wrong/wrong.onnx"}
    assert not report.quality.missed
    advice = compare_models(model, bundle, RunOptions.of(runtimes=["ort-cpu"])).explanations
    assert "which the float model is not; --budget" in advice[0]


@pytest.mark.parametrize("name", ["", "model.ort.level1.onnx", "model.ort.decode-level1.onnx"])
def test_a_graph_that_rounds_inputs_needs_one_like_it_that_does_not(name, tmp_path):
    folder = shutil.copytree(rounding("int4"), tmp_path / "bundle")
    content = manifest_content(folder)
    if name:  # the one for any number of tokens, which takes another one's place
        content["graphs"]["model.ort.decode.onnx"]["exact"] = name
    else:  # one that rounds nothing
        shutil.copy(folder / "model.ort.level1.onnx", folder / "model.ort.onnx")
    if name == "model.ort.level1.onnx":
        with pytest.raises(UsageError, match="which is no graph like it"):
            write_manifest(folder, content)
        return
    write_manifest(folder, content)
    if name:
        assert verify(folder, **RUN).passed
        return
    with pytest.raises(BundleError, match="it rounds no inputs of products"):
        verify(folder, **RUN)


@pytest.mark.parametrize("language", extended(["python", "node", "c"], "c".__ne__))
def test_kits_judge_graphs_that_round_inputs_by_their_own_errors(language, need, tmp_path):
    need({"python": "ort-cpu"}.get(language, language))
    kit = write_kit(language, rounding("int4"), tmp_path / "kit")
    if language == "c":
        compile_kit(language, kit, "Debug")
    if language == "node":
        (kit / "node_modules").symlink_to(home() / language / "node_modules")

    def test() -> subprocess.CompletedProcess[str]:
        return subprocess.run(SELF_TEST[language], cwd=kit, capture_output=True, text=True)

    assert (done := test()).returncode == 0, done.stdout + done.stderr
    # By the errors of the other graph it fails.
    if language != "c":
        places = {
            "python": ("attn_kit/settings.py", "ROUNDS_INPUTS = True", "ROUNDS_INPUTS = False"),
            "node": ("bundle/manifest.json", '"exact"', '"inexact"'),
        }
        name, old, new = places[language]
        text = (kit / name).read_text(encoding="utf-8")
        assert old in text
        (kit / name).write_text(text.replace(old, new), encoding="utf-8")
        assert test().returncode != 0


def test_what_is_kept_stays_floating_or_gets_other_integers():
    options = {"weights_dtype": "int4", "keep": "lm_head,layers.0,layers.1.mlp.up_proj"}
    subject = Subject.from_model(tiny_decoder("llama"), **options)
    graphs, _ = lower_all(export(subject), ("ort",))
    names = {
        value.name: value.dtype.name
        for value in graphs[0].model.graph.initializers.values()
        if value.shape is not None and len(value.shape) > 1
    }
    packed = {name.partition(".packed")[0] for name in names if ".packed" in name}
    assert all(".layers.1." in name and "up_proj" not in name for name in packed), packed
    assert len(packed) == 4  # q, k and v, which lie side by side; the output, gate and down
    assert any("kept floating: lm_head, model.layers.0" in note for note in subject.notes)
    options["keep"] = "lm_head=int8,layers.0,layers.0.self_attn.v_proj=int8"
    subject = Subject.from_model(tiny_decoder("llama"), **options)
    of_dialect = {}
    for dialect in ("standard", "ort"):
        graphs, _ = lower_all(export(subject), (dialect,), rounds_inputs=True)
        of_dialect |= {graph.file.name: graph.model.graph for graph in graphs}
    types = [value.dtype.name for value in of_dialect["model.onnx"].initializers.values()]
    # q and k, which stay floating, lie side by side, as do all three of the other layer.
    assert [types.count(name) for name in ("INT8", "INT4")] == [2, 4]
    for name, level in (("model.ort.onnx", 4), ("model.ort.level1.onnx", 1)):
        nodes = [node for node in of_dialect[name] if node.op_type == NBITS]
        found = {
            (n.attributes.get_int("bits"), n.attributes.get_int("accuracy_level")) for n in nodes
        }
        assert found == {(4, level), (8, level)}


def test_weights_that_are_stored_by_input_are_rounded_too():
    subject = Subject.from_model(tiny_decoder("gpt2", num_hidden_layers=1), weights_dtype="int8")
    graphs, _ = lower_all(export(subject), ("standard",))
    counts = [node.op_type for node in graphs[0].model.graph]
    # The output layer shares its weight with the embeddings, which stay floating.
    assert counts.count("DequantizeLinear") == 5


@pytest.mark.parametrize(
    ("model", "dtype", "error", "message"),
    [
        (tiny_decoder("llama"), "int3", UsageError, "is int4, int8 or none; got 'int3'"),
        (tiny_decoder("llama", intermediate_size=40), "int4", ExportError, "has 40 inputs"),
        (tiny_pair("t5"), "int4", UsageError, "is for decoders; leave it out"),
    ],
)
def test_what_cannot_be_rounded_is_refused(model, dtype, error, message):
    with pytest.raises(error, match=message):
        Subject.from_model(model, weights_dtype=dtype)


@pytest.mark.parametrize(("options", "message"), [
    ({"weights_dtype": "int4", "accuracy_level": 2}, "accuracy_level is 4 or 1; got 2"),
    ({"accuracy_level": 4}, "accuracy_level 4 is about products with integers; give weights_dtype"),
    ({"weights_dtype": "int4", "keep": "layers.9"}, "keep 'layers.9': no weight that would be"),
    ({"weights_dtype": "int4", "keep": "lm_head,head"}, "keep 'head': no weight that would be"),
    ({"weights_dtype": "int4", "keep": "lm_head=int3"}, "=int3': the type is int4, int8 or none"),
    ({"weights_dtype": "int4", "keep": "lm_head", "fit": True}, "leave keep 'lm_head' out"),
    ({"weights_dtype": "int4", "kv_dtype": "float16", "fit": True}, "leave kv_dtype float16 out"),
    ({"fit": True}, "fit: nothing is rounded; give weights_dtype"),
    ({"weights_dtype": "int4", "rounding": "best"}, "rounding is search or nearest, of"),
    ({"weights_dtype": "int8", "rounding": "search"}, "int4; got 'search' and int8"),
    ({"weights_dtype": "int4", "inputs": [[[64]]]}, "input_ids holds 64; the model takes 0 to 63"),
    ({"weights_dtype": "int4", "keep": "lm_head,"}, "keep '': no weight that would be rounded"),
    ({"weights_dtype": "int4", "keep": "lm_head,layers"}, "there are no linear layers in float32"),
    ({"keep": "lm_head"}, "keep 'lm_head': nothing is rounded; give weights_dtype"),
])  # fmt: skip
def test_options_that_are_unknown_or_of_no_integers_are_refused(options, message):
    with pytest.raises((UsageError, ExportError), match=message):
        Subject.from_model(tiny_decoder("llama"), **options)


def test_weights_that_are_not_finite_and_budgets_without_integers_are_refused(tmp_path):
    model = tiny_decoder("llama")
    with pytest.raises(UsageError, match="needs quantised weights"):
        build(Subject.from_model(model), tmp_path / "out", budgets=["sqnr>=9"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight cannot be quantised"):
        Subject.from_model(model, weights_dtype="int4")
