"""Models of which one layer is in memory at a time, and their graphs in slices."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tiny_encoders import tiny_encoder

from attn_export import Subject, temp_folders
from attn_export.commands.compare import compare_models
from attn_export.errors import WeightsError
from attn_export.export.export import export
from attn_export.graph.save import save_graph
from attn_export.parts.whole_models import model_checkpoint, unit_weights
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.unit_weights import (
    copy_by_unit,
    in_step,
    is_by_unit,
    stored_weights,
)
from attn_export.quantiser import QuantisedWeight
from attn_export.results import BASE
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import RunOptions

EXPORTS = Path(__file__).parent / "exports"
TYPES = ("gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "t5")
IDS = torch.tensor([[5, 9, 3, 1, 7], [8, 8, 2, 6, 4]])


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Let tiny models count as large."""
    monkeypatch.setattr(unit_weights, "_SMALL", 16)
    # So layers that consist of linear layers, as llama's, are several units.
    monkeypatch.setattr(unit_weights, "_WIDENED", 2**12)
    monkeypatch.setattr(model_checkpoint, "LARGE", 0)
    monkeypatch.setattr(temp_folders, "_NOT_USED", [])


def _logits(model):
    with torch.no_grad():
        more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        return model(input_ids=IDS, **more).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_it_is_the_model_that_transformers_loads_in_the_type(kind, dtype):
    folder = EXPORTS / kind / "checkpoint"
    model, checkpoint = read_checkpoint(folder).load_by_unit(dtype), read_checkpoint(folder)
    checkpoint.config.dtype = dtype
    whole = checkpoint.load()
    assert is_by_unit(model)
    assert not is_by_unit(whole)
    buffers = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        assert buffers[name].dtype == buffer.dtype, name
        assert torch.equal(buffers[name], buffer), name
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    assert types == {name: weight.dtype for name, weight in whole.named_parameters()}
    assert torch.equal(_logits(model), _logits(whole))
    # After a run, no weight is left.
    assert all(x.isnan().all() for x in model.parameters() if x.numel() > 16)


def test_weights_of_another_type_than_the_config_has_are_converted_into_files(monkeypatch):
    shapes, in_file = [], unit_weights._in_file
    monkeypatch.setattr(
        unit_weights, "_in_file", lambda shape, *rest: shapes.append(shape) or in_file(shape, *rest)
    )
    models = [read_checkpoint(EXPORTS / "llama" / "checkpoint") for _ in range(2)]
    for checkpoint in models:
        checkpoint.config.dtype = torch.float16  # its files have float32
    by_unit, whole = models[0].load_by_unit(), models[1].load()
    large = [weight.shape for _, weight in stored_weights(by_unit) if weight.numel() > 16]
    assert sorted(shapes) == sorted(large)
    assert torch.equal(_logits(by_unit), _logits(whole))


def test_runs_in_step_read_each_unit_once_and_give_what_single_runs_give(monkeypatch):
    model = read_checkpoint(EXPORTS / "llama" / "checkpoint").load_by_unit()
    double = copy_by_unit(model, lambda *_: torch.float64)
    single = [_logits(model), _logits(double)]
    read, load = list[int](), unit_weights._load

    def counted(unit):
        read.append(unit._stored_weights.number)
        load(unit)

    monkeypatch.setattr(unit_weights, "_load", counted)
    found = in_step([lambda: _logits(double), lambda: _logits(model), lambda: _logits(double)])
    assert [torch.equal(x, y) for x, y in zip(found, [*single[::-1], single[1]], strict=True)]
    assert sorted(read) == sorted([*range(max(read) + 1)] * 2)  # in each of the two types
    assert read == sorted(read)


def test_runs_with_changed_inputs_for_notes_are_made_with_the_cases(monkeypatch):
    subject = Subject.from_model(EXPORTS / "llama" / "checkpoint")
    oracle = subject.oracle(0.0)
    (base,) = (case for case in subject.plan().cases if case.name == BASE)
    assert len([*oracle.goldens([base], lambda _: None)]) == 1
    read = list[object]()
    monkeypatch.setattr(unit_weights, "_load", read.append)
    oracle.notes(base)
    assert read == []


def test_the_ties_of_experts_take_one_more_pass_for_all_cases(monkeypatch):
    subject = Subject.from_model(EXPORTS / "mixtral" / "checkpoint")
    oracle, cases = subject.oracle(0.0), [*subject.plan().cases][:3]
    loads, load = Counter[int](), unit_weights._load

    def counted(unit):
        loads[unit._stored_weights.number] += 1
        load(unit)

    monkeypatch.setattr(unit_weights, "_load", counted)
    assert len([*oracle.goldens(cases, lambda _: None)]) == len(cases)
    # The model in its type and in float64, and the latter again with other orders of the experts.
    assert {*loads.values()} == {3}


@pytest.mark.parametrize("largest", [2**12, 2**10])  # larger ones lie in files
def test_weights_are_dequantised_once_for_a_model_and_its_copy_in_float64(largest, monkeypatch):
    monkeypatch.setattr(unit_weights, "_WIDENED", largest)
    subject = Subject.from_model(EXPORTS / "llama" / "checkpoint", weights_dtype="int4")
    oracle, case = subject.oracle(0.0), next(iter(subject.plan().cases))
    read, by_output = list[object](), QuantisedWeight.by_output

    def counted(weight, *rows):
        read.append((id(weight.integers), str(rows)))
        return by_output(weight, *rows)

    monkeypatch.setattr(QuantisedWeight, "by_output", counted)
    oracle.references([case.inputs])
    assert len(read) == len({*read}) > 5
    assert len(oracle._weights._changed._kept) == 0


def test_more_runs_than_threads_are_made_in_step():
    assert in_step([functools.partial(int, n) for n in range(1200)]) == [*range(1200)]


def test_embeddings_that_other_modules_read_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_weights, "_SMALL", 64)
    model = tiny_encoder("deberta-v2")
    model.save_pretrained(tmp_path)
    by_unit = read_checkpoint(tmp_path).load_by_unit()
    assert is_by_unit(by_unit)
    with torch.no_grad():
        assert torch.equal(by_unit(IDS).last_hidden_state, model(IDS).last_hidden_state)


def test_an_error_in_one_run_in_step_ends_all_and_drops_the_weights():
    model = read_checkpoint(EXPORTS / "llama" / "checkpoint").load_by_unit()
    ended = []

    def fails():
        model(input_ids=IDS, attention_mask=torch.ones(3, 3, 3))

    def runs():
        _logits(model)
        ended.append(True)

    with pytest.raises(Exception, match=r"size|shape|dimension"):
        in_step([runs, fails, runs])
    assert not ended
    assert all(weight.isnan().all() for weight in model.parameters() if weight.numel() > 16)
    _logits(model)


@pytest.mark.skipif(sys.platform == "win32", reason="threads are sent no signals there")
def test_an_interruption_ends_all_runs_in_step():
    model = read_checkpoint(EXPORTS / "llama" / "checkpoint").load_by_unit()

    def slow():
        # It wakes the main thread up, as that of a user does, while this run works.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)
        _logits(model)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            in_step([slow, lambda: _logits(model)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(weight.isnan().all() for weight in model.parameters() if weight.numel() > 16)


def test_stored_weights_are_those_of_the_checkpoint():
    folder = EXPORTS / "llama" / "checkpoint"
    whole = dict(read_checkpoint(folder).load().named_parameters())
    found = dict(stored_weights(read_checkpoint(folder).load_by_unit()))
    assert all(torch.equal(weight, found[name]) for name, weight in whole.items())


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are told by Linux alone")
@pytest.mark.parametrize("kind", ["llama", "mixtral"])  # mixtral joins tensors of its experts
def test_no_large_weight_is_in_memory_of_the_process(kind):
    model = read_checkpoint(EXPORTS / kind / "checkpoint").load_by_unit()
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [[int(x, 16) for x in line[0].split("-")] for line in lines if "/" in line[-1]]
    weights = {n: x.data_ptr() for n, x in stored_weights(model) if x.numel() > unit_weights._SMALL}
    held = [n for n, at in weights.items() if not any(low <= at < high for low, high in mapped)]
    assert weights
    assert not held


def _judged(name: str, *, slices: bool):
    folder = EXPORTS / name
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    limits = dataclasses.replace(Limits.default(), slice_mib=size / 40 if slices else None)
    run = RunOptions.of(runtimes=["ort-cpu"], limits=limits)
    return compare_models(folder.parent / "checkpoint", folder, run)


@pytest.mark.parametrize(("name", "slices"), [("gpt2/mobius", False), ("llama/genai", True)])
def test_right_exports_pass_with_one_layer_in_memory(name, slices):
    report = _judged(name, slices=slices)
    assert report.passed, report.explanations
    counts = [ran.facts.get("slices") for ran in report.runs]
    assert all((count or 0) > 1 for count in counts) == slices
    assert any("slices: fusions" in note for note in report.notes) == slices


def _damaged(name: str | Path, part: str, folder: Path, factor: float = 1.01) -> Path:
    """Return a copy of an export in which the weight whose name has `part` has other values."""
    target = shutil.copytree(EXPORTS / name, folder / "graphs")
    (path,) = target.glob("*.onnx")
    model = onnx.load(path)
    named = (x for x in model.graph.initializer if part in x.name)
    weight = max(named, key=lambda x: len(x.dims))  # no bias
    array = numpy_helper.to_array(weight)
    array = array * array.dtype.type(factor)
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, path)
    return target


@pytest.mark.parametrize(
    ("name", "part", "layer", "says"),
    [
        ("llama/genai", "layers.1.attn.qkv_proj", "layer 1",
         r"/model/layers.1/attn/qkv_proj/MatMul \(model.layers.1.self_attn.q_proj, .*it is MatMul"),
        ("gpt2/mobius", "h.1.mlp.down_proj", "layer 1", r"its weight .*c_proj.* is 1.01 times"),
        ("llama/genai", "layers.1.post_attention_layernorm", "layer 1",
         r"SkipSimplified.* its weight .*post_attention_layernorm.weight in the model, is 1.01 t"),
        ("llama/mobius", "lm_head", "what follows the layers", r"MatMul_node_61 \(lm_head, "),
        ("mixtral/mobius", "embed_tokens", "the embeddings", "Gather model/embed_tokens"),
    ],
)  # fmt: skip
def test_the_wrong_layer_and_node_of_a_large_model_are_named_alone(
    name, part, layer, says, tmp_path
):
    graphs = _damaged(name, part, tmp_path)
    report = compare_models(EXPORTS / name / "../checkpoint", graphs, RunOptions.of())
    assert not report.passed
    assert re.search(f"its first wrong value: .*{says}", report.explanations[0])
    assert f"on the reference's input, wrong: {layer} (off by" in report.explanations[0]
    assert report.explanations[0].count("off by") == 1
    assert [each.name for each in report.layers if each.is_wrong] == [layer]


def test_the_wrong_layer_of_a_float16_graph_is_named_alone(tmp_path):
    checkpoint, right = EXPORTS / "llama" / "checkpoint", tmp_path / "right"
    right.mkdir()
    model = export(Subject.from_model(checkpoint, dtype="float16")).model
    save_graph(model, right / "model.onnx")
    graphs = _damaged(right, "layers.1.mlp.down_proj", tmp_path, 2)
    report = compare_models(checkpoint, graphs, RunOptions.of())
    # Its tables of positions are rounded, so that right layers are off by 1e-4.
    assert [each.name for each in report.layers if each.is_wrong] == ["layer 1"], str(report)
    assert "mlp.down_proj.weight in the model, is 2 times" in report.explanations[0]


def test_wrong_embeddings_hide_no_wrong_layer(tmp_path):
    graphs = _damaged("llama/mobius", "layers.1.mlp.down_proj", tmp_path)
    (path,) = graphs.glob("*.onnx")
    model = onnx.load(path)
    weight = next(x for x in model.graph.initializer if "embed_tokens" in x.name)
    array = numpy_helper.to_array(weight)
    weight.CopyFrom(numpy_helper.from_array(np.roll(array, 5, 0), weight.name))
    onnx.save(model, path)
    report = compare_models(EXPORTS / "llama" / "checkpoint", graphs, RunOptions.of())
    wrong = [each.name for each in report.layers if each.is_wrong]
    assert wrong == ["the embeddings", "layer 1"]


def test_layers_of_small_models_are_judged_alone_too(tmp_path, monkeypatch):
    monkeypatch.setattr(model_checkpoint, "LARGE", 2**26)
    graphs = _damaged("qwen3/mobius", "layers.1.mlp.down_proj", tmp_path)
    report = compare_models(EXPORTS / "qwen3" / "checkpoint", graphs, RunOptions.of())
    wrong = [(each.name, each.is_wrong) for each in report.layers]
    assert wrong[:3] == [("the embeddings", False), ("layer 0", False), ("layer 1", True)]
    page = report.to_html()
    assert page.count("layer 1: off by") == 1
    assert f"<td>{report.layers[2].value}</td>" in page


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("granite/mobius", [4]),  # scales embeddings, which keep their direction
        ("t5/mobius", [5, 4]),  # takes logarithms of positions; three parts of one decoder layer
    ],
)
def test_all_layers_of_a_right_graph_are_right(name, counts, monkeypatch):
    monkeypatch.setattr(model_checkpoint, "LARGE", 2**26)
    report = _judged(name, slices=False)
    assert report.passed
    assert [*Counter(each.graph for each in report.layers).values()] == counts
    assert not any(each.is_wrong for each in report.layers)


def test_a_runtime_that_is_wrong_is_told_from_a_graph_that_is():
    report = _judged("llama/transformers-fused", slices=False)
    assert "all its layers are right" in report.explanations[0]


def test_a_truncated_shard_is_one_line(tmp_path):
    folder = shutil.copytree(EXPORTS / "llama" / "checkpoint", tmp_path / "checkpoint")
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="truncated"):
        read_checkpoint(folder).load_by_unit()


@pytest.mark.skipif(sys.platform == "win32", reason="processes have no such limits there")
def test_a_mapped_checkpoint_is_not_counted_as_allocated():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = 1 << 40
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, before[1]))
    try:
        folder = EXPORTS / "llama" / "checkpoint"
        read_checkpoint(folder).load_by_unit()
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == allowed + size
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
