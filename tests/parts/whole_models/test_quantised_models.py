"""Quantised graphs of whole models: budgets, and the model of the graph's own integers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from attn_export import assert_parity, verify
from attn_export.commands.compare import compare_models
from attn_export.errors import UsageError
from attn_export.judge.judge import judge
from attn_export.judge.replay import RuntimeDistances
from attn_export.parts.whole_models.integer_weights import (
    read_integers,
    with_float_products,
    with_integers,
)
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.quality import Budget, Quality
from attn_export.results import Case, Golden
from attn_export.runtimes.run_options import RunOptions
from attn_export.schema import Tolerance

EXPORTS = Path(__file__).parent / "exports"
BERT = EXPORTS / "bert" / "checkpoint"

TABLES = {
    "op_types_to_quantize": ("MatMul", "Gather"),
    "quant_axes": (("MatMul", 0), ("Gather", 1)),
}

pytestmark = pytest.mark.xdist_group("test_quantised_models")  # its evidence is shared


def quantised(export: str, folder: Path, level: int = 0, **options: object) -> Path:
    """Write the graph of an export with weights as integers, by ONNX Runtime's own quantiser."""
    model = onnx.load(EXPORTS / export / "model.onnx")
    given = {"block_size": 16, "is_symmetric": True, **options}
    config = DefaultWeightOnlyQuantConfig(accuracy_level=level, **given)
    quantiser = MatMulNBitsQuantizer(model, algo_config=config)
    quantiser.process()
    folder.mkdir(exist_ok=True)
    onnx.save(quantiser.model.model, folder / "model.onnx")
    return folder / "model.onnx"


def run(*budgets: str) -> RunOptions:
    return RunOptions.of(runtimes=["ort-cpu"], budgets=budgets)


# -- the integers of a graph --------------------------------------------------------------------

FORMS = {
    "packed queries, keys and values": ("llama/genai", {}, 11),
    "8 bits": ("llama/optimum", {"bits": 8}, 15),
    "transposed weights and tables": ("gpt2/mobius", TABLES, 15),
    "zero points, experts apart": (
        "mixtral/mobius", {"is_symmetric": False, "quant_format": QuantFormat.QDQ}, 35
    ),
    "a table and a head that share a parameter": ("gemma2/optimum", TABLES, 16),
}  # fmt: skip
"""Exports and how they are quantised, and the number of their quantised weights."""


@pytest.mark.parametrize("form", FORMS)
def test_integers_replace_the_parameters_that_they_were_rounded_from(form, tmp_path):
    export, options, count = FORMS[form]
    stored = read_integers(quantised(export, tmp_path, **options))
    assert (len(stored.weights), stored.problem) == (count, "")
    model = read_checkpoint(EXPORTS / export.split("/")[0] / "checkpoint").load()
    before = {n: x.clone() for n, x in model.named_parameters(remove_duplicate=False)}
    changed, problem = with_integers(model, stored)
    assert problem == ""
    arrays, replaced = [np.float32(array) for array, _ in stored.weights.values()], 0
    numbers = np.unique(np.concatenate([array.ravel() for array in arrays]))
    for name, after in changed.named_parameters(remove_duplicate=False):
        after, own = after.detach(), before[name].detach()
        distance = float((after - own).norm() / own.norm())
        assert distance < 0.2, name
        if distance:
            replaced += after.numel()
            assert np.isin(after, numbers).all(), name
    assert replaced == sum(array.size for array in arrays)
    assert all((x == before[n]).all() for n, x in model.named_parameters())


def test_the_integers_of_onnxruntime_genai_are_read():
    """The graph is what `onnxruntime_genai.models.builder -p int4 -e cpu` of 0.18.0 makes."""
    stored = read_integers(Path(__file__).parent / "quantised" / "llama-int4" / "model.onnx")
    assert (len(stored.weights), stored.problem, stored.rounds_inputs) == (11, "", True)
    model, problem = with_integers(read_checkpoint(EXPORTS / "llama" / "checkpoint").load(), stored)
    assert problem == ""
    packed = np.concatenate([
        model.get_parameter(f"model.layers.1.self_attn.{name}_proj.weight").detach()
        for name in "qkv"
    ])  # fmt: skip
    np.testing.assert_array_equal(
        packed, np.float32(stored.weights["model.layers.1.attn.qkv_proj.MatMul.weight_Q4"][0])
    )


def test_weights_of_another_model_are_named(tmp_path):
    stored = read_integers(quantised("llama/genai", tmp_path))
    other = read_checkpoint(EXPORTS / "mistral" / "checkpoint").load()
    changed, problem = with_integers(other, stored)
    assert changed is None
    assert re.match(r"no parameter of the model is near model\.layers\.0\.attn", problem)


def test_a_copy_of_a_graph_multiplies_in_float(tmp_path):
    path = quantised("llama/genai", tmp_path, level=4)
    assert read_integers(path).rounds_inputs
    with with_float_products(path) as copy:
        assert not read_integers(copy).rounds_inputs
        assert read_integers(copy).operators == ("MatMulNBits",)


# -- budgets ------------------------------------------------------------------------------------


BUDGETS = ("sqnr>=10", "kl<=0.1", "top1>=0.5")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return quantised("bert/optimum", tmp_path_factory.mktemp("bert"), level=4)


@pytest.fixture(scope="module")
def evidence(bert, tmp_path_factory):
    """The evidence of a right graph, and the report on it."""
    out = tmp_path_factory.mktemp("evidence") / "out"
    return out, compare_models(BERT, bert, run(*BUDGETS), output=out)


@pytest.fixture
def wrong(bert, tmp_path):
    """A graph whose scale of attention is 5 % too large."""
    model = onnx.load(bert)
    for node in model.graph.node:
        if re.search(r"attention/self/Constant_13$", node.name):  # the 1 of 1 / sqrt(D)
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32([1.05])))
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_right_graph_passes_by_both_references(evidence):
    _, report = evidence
    assert report.passed, str(report)
    assert {v.graph for v in report.verdicts} == {"model/model.onnx", "model-budget/model.onnx"}
    strict = [v for v in report.verdicts if v.graph == "model/model.onnx"]
    assert all(v.status == "passed" and v.worst < 1 for v in strict)
    assert [x.part for x in report.quality.outputs] == ["model-budget/logits in ort-cpu"]
    assert any("in a copy of the graph with accuracy_level 1" in note for note in report.notes)
    # What is lost is told by cause and by layer.
    alone, rounded, whole = report.quality.causes
    assert [x.part.rpartition("/")[2] for x in report.quality.causes] == [
        "weights alone", "with rounded inputs", "whole, logits in ort-cpu",
    ]  # fmt: skip
    assert 0 < abs(rounded.sqnr - alone.sqnr) < 3
    assert abs(whole.sqnr - rounded.sqnr) < 1
    dearest = report.quality.layers[0]
    assert alone.sqnr < dearest.sqnr < report.quality.layers[-1].sqnr


def test_evidence_is_judged_again_by_its_budget_or_another(evidence):
    out, report = evidence
    replayed = verify(out, run())
    assert replayed.passed
    assert replayed.quality.outputs == report.quality.outputs
    assert replayed.quality.logits == report.quality.logits
    assert any("budget sqnr>=10" in note and "own claim" in note for note in replayed.notes)
    beyond = verify(out, run("sqnr>=60"))
    assert beyond.exit_code == 6
    assert beyond.quality.missed[0].startswith("model-budget/logits in ort-cpu: sqnr ")
    with pytest.raises(UsageError, match="nothing to measure it on"):
        verify(out / "model", run("sqnr>=60"))


def test_a_fault_that_a_budget_allows_fails_by_the_other_reference(evidence, wrong):
    out, _ = evidence
    assert verify(out / "model-budget", run(), graph=wrong).passed
    with with_float_products(wrong) as copy:
        report = verify(out / "model", run(), graph=copy)
    assert report.exit_code == 6
    assert min(v.worst for v in report.verdicts if v.status == "failed") > 100


@pytest.mark.extended
def test_the_cause_of_a_fault_in_a_quantised_graph_is_named(wrong):
    with pytest.raises(AssertionError, match=r"the scale of attention is 0\.371") as raised:
        assert_parity(BERT, graphs=wrong, budgets=BUDGETS, runtimes=["ort-cpu"])
    assert "beyond the budget" not in str(raised.value)


def test_without_a_budget_a_quantised_graph_fails_with_advice(bert):
    report = compare_models(BERT, bert, run())
    assert report.exit_code == 6
    assert re.search(r"is quantised \(MatMulNBits\).*--budget sqnr>=20", report.explanations[0])


def test_integers_that_are_not_read_leave_the_budget_alone(tmp_path):
    quantize_dynamic(EXPORTS / "bert" / "optimum" / "model.onnx", tmp_path / "model.onnx")
    report = compare_models(BERT, tmp_path, run("sqnr>=10", "top1>=1"))
    assert {v.graph for v in report.verdicts} == {"model-budget/model.onnx"}
    assert any("judged by the budget alone: " in note for note in report.notes)
    assert report.exit_code == 6
    (missed,) = report.quality.missed
    assert re.match(r"model-budget/logits in ort-cpu: top1 0\.\d+, budget top1>=1", missed)


def test_a_budget_on_logits_needs_logits():
    with pytest.raises(UsageError, match="no output is called logits"):
        compare_models(EXPORTS / "t5" / "checkpoint", ENCODER, run("kl<=0.1"))


ENCODER = EXPORTS / "t5" / "optimum" / "encoder_model.onnx"


GOT = np.float32([[1, 2], [3, 4]])
WRONG = {
    "a NaN": {"logits": np.float32([[1, np.nan], [3, 4]])},
    "another shape": {"logits": GOT[:1]},
    "another type": {"logits": GOT.astype(np.float64)},
    "no output": {},
}


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_a_budget_allows_errors_but_no_other_kind_of_output(wrong):
    reference = {"logits": 3 * GOT}
    case = Case("base", "shape", {}, {}, "")
    tolerance = {"logits": Tolerance(math.inf, math.inf)}
    golden = Golden(case, reference, reference, tolerance, {}, budgets=(Budget("sqnr", 10.0),))
    outputs = WRONG.get(wrong, {"logits": GOT})
    (verdict,) = judge("r", "g", golden, outputs)
    assert verdict.status == ("failed" if wrong else "passed")
    distances = RuntimeDistances(golden.budgets)
    distances.add([verdict], golden, outputs)
    quality = distances.quality()
    assert (quality is None) == bool(wrong)
    if quality is not None:
        assert quality.outputs[0].sqnr == pytest.approx(20 * math.log10(1.5), abs=1e-4)


def test_padding_does_not_count():
    reference = {"logits": np.ones((2, 2, 3), np.float32)}
    got = {"logits": reference["logits"] + np.float32(0.1)}
    got["logits"][1, 0] = 1e6
    case = Case("base", "shape", {}, {}, "", ignored_rows=(1,))
    golden = Golden(
        case, reference, reference, {"logits": None}, {}, determined={"logits": (3,)},
        budgets=(Budget("sqnr", 10.0),),
    )  # fmt: skip
    distances = RuntimeDistances(golden.budgets)
    distances.add(judge("r", "g", golden, got), golden, got)
    assert distances.quality().outputs[0].sqnr == pytest.approx(20, abs=1e-3)


def test_each_runtime_has_its_own_distance():
    reference = {"logits": np.ones((2, 3), np.float32)}
    case = Case("base", "shape", {}, {}, "")
    golden = Golden(
        case, reference, reference, {"logits": None}, {}, budgets=(Budget("row", 0.15),)
    )
    distances = RuntimeDistances(golden.budgets)
    for runtime, error in (("one", 0.1), ("other", 0.2)):
        got = {"logits": reference["logits"] + np.float32(error)}
        distances.add(judge(runtime, "g", golden, got), golden, got)
    quality = Quality.joined({"a/": distances.quality(), "b/": distances.quality()})
    assert [d.part for d in quality.outputs[:2]] == ["a/logits in one", "a/logits in other"]
    assert [d.part for d in quality.of_logits[2:]] == ["b/logits in one", "b/logits in other"]
    said = "logits in other: row 0.2, budget row<=0.15"
    assert quality.missed == (f"a/{said}", f"b/{said}")


BAD = {"block_size": 0, "K": -1, "N": 2**62, "bits": 3}
"""Attributes of a MatMulNBits, with values that it cannot have."""


@pytest.mark.parametrize("name", BAD)
def test_integers_that_make_no_sense_are_a_problem_in_one_line(name, tmp_path):
    path = quantised("llama/genai", tmp_path)
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    next(a for a in node.attribute if a.name == name).i = BAD[name]
    onnx.save(model, path)
    assert re.fullmatch(
        r"MatMulNBits /model/layers\.0.* cannot be read: .+", read_integers(path).problem
    )


def test_weights_without_numbers_are_near_no_parameter(tmp_path):
    path = quantised("llama/genai", tmp_path)
    model = onnx.load(path)
    scales = next(t for t in model.graph.initializer if "MatMul" in t.name and t.data_type == 1)
    nan = np.full_like(numpy_helper.to_array(scales), np.nan)
    scales.CopyFrom(numpy_helper.from_array(nan, scales.name))
    onnx.save(model, path)
    own = read_checkpoint(EXPORTS / "llama" / "checkpoint").load()
    assert with_integers(own, read_integers(path))[0] is None
