"""`compare --inputs`: inputs of the user's own are cases of whole models, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from test_compare_models import EXPORTS, RUN
from tokenizers import Tokenizer, models, pre_tokenizers

from attn_export import assert_parity, verify
from attn_export.bundle.golden import read_golden
from attn_export.commands.compare import compare_models
from attn_export.errors import UsageError
from attn_export.parts.whole_models.build.model import subject_of_model
from attn_export.parts.whole_models.export_layouts import read_export
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.model_reference import reference_of
from attn_export.parts.whole_models.own_inputs import read_own
from attn_export.results import Case, Report

PAST = np.ones((1, 1, 3, 16), "f4")
PROMPTS = [[5, 6, 7, 8], [9] * 12, [1, 2]]


def own_cases(name: str, source: Any, folder: Path | None = None) -> dict[str, Case]:
    """Return the cases of the user's own inputs of an export's first graph, by name."""
    exported = read_export(EXPORTS / name)
    checkpoint = EXPORTS / name.split("/")[0] / "checkpoint"
    model = read_checkpoint(checkpoint).load()
    own = read_own([source], exported.entries, model, folder or checkpoint)
    reference = reference_of(model, exported.entries[0], exported.layout.promises, own=own)
    return {case.name: case for case in reference.plan().cases if case.name.startswith("own")}


def failed(report: Report) -> set[str]:
    return {verdict.case for verdict in report.verdicts if verdict.status == "failed"}


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(PROMPTS))
    return path


@pytest.mark.parametrize(
    ("name", "side"),
    [("llama/mobius", "left"), ("llama/genai", "right"), ("llama/mobius-static", "")],
)
def test_prompts_are_tried_alone_and_padded_as_the_layout_promises(ids, name, side):
    cases = own_cases(name, ids)
    alone = [cases[f"own_inputs_{number}"].inputs["input_ids"].tolist() for number in (1, 2, 3)]
    assert alone == [[prompt] for prompt in PROMPTS]
    assert ("own_inputs_1_to_3" in cases) == bool(side)
    if side:
        together = cases["own_inputs_1_to_3"]
        kept = together.inputs["attention_mask"]
        assert kept.sum(1).tolist() == [4, 12, 2]
        assert kept[:, 0 if side == "left" else -1].tolist() == [0, 1, 0]
        assert together.inputs["input_ids"][kept != 0].tolist() == [
            x for each in PROMPTS for x in each
        ]
        assert together.ignored_rows == (0, 2)


def test_text_is_read_by_the_models_tokenizer(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("b a\n\na\n")
    with pytest.raises(UsageError, match=r"has no tokenizer\.json; give token ids"):
        own_cases("llama/mobius", text)
    tokenizer = Tokenizer(models.WordLevel({"a": 7, "b": 9, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cases = own_cases("llama/mobius", text, tmp_path)
    assert [*cases["own_inputs_1"].inputs["input_ids"][0]] == [9, 7]
    assert cases["own_inputs_2"].about == f"{text}, prompt 2"


def test_arrays_are_cases_and_what_is_left_out_follows_from_them(tmp_path):
    path = tmp_path / "a.npz"
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    np.savez(path, input_ids=np.full((2, 4), 3, "i4"), attention_mask=mask)
    case = own_cases("llama/mobius", path)["own_inputs_1"]
    assert case.inputs["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert case.inputs["past_key_values.0.key"].shape[2] == 0
    assert case.ignored_rows == (0,)
    past = {
        name: array
        for name, array in case.inputs.items() if name.startswith("past")
        for array in [np.ones((1, array.shape[1], 5, array.shape[3]), "f4")]
    }  # fmt: skip
    np.savez(path, input_ids=[[3]], **past)
    case = own_cases("llama/mobius", path)["own_inputs_1"]
    assert case.sizes["past_len"] == 5
    assert case.inputs["position_ids"].tolist() == [[5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[1, 64]], "input_ids holds 64; the model takes 0 to 63"),
        ([[1, -1]], "input_ids holds -1"),
        ([[]], "prompt 1 is []; give lists of token ids or texts"),
        ([[1.5]], "prompt 1 is [1.5]"),
        ([[10**40]], "prompt 1 is [1000000"),
        ({"a": 1}, "gives no set of inputs"),
        ([], "give 1 to 100"),
        ([[1]] * 101, "gives 101 sets of inputs"),
        ([[1] * 5000], "5000 tokens, and the model takes"),
        ({"input_ids": [[1, 2]], "other": [1]}, "another name: other"),
        ({"attention_mask": [[1, 1]]}, "lacks input_ids"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1]]},
            "a mask of 1 for 0 past and 2 new",
        ),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "has no token"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 7]]}, "holds 7; the model takes 0 to 1"),
        ({"input_ids": [1, 2]}, "input_ids is int64 [2]; the graph takes int64"),
        ({"input_ids": [[0.5]]}, "input_ids is float64 [1, 1]"),
        (
            {"input_ids": [[1]], "past_key_values.0.key": np.ones((1, 1, 3, 16), "f4")},
            "lacks past_key_values.0.value",
        ),
        ({"input_ids": [[1]] * 2, "position_ids": [[9999]] * 2}, "the model refuses"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_what_to_do(tmp_path, content, message):
    path = tmp_path / "a.json"
    if isinstance(content, dict) and "a" not in content:
        path = path.with_suffix(".npz")
        np.savez(path, **content)
    else:
        path.write_text(json.dumps(content))
    with pytest.raises(UsageError) as error:
        own_cases("gpt2/mobius" if "position_ids" in str(content) else "llama/mobius", path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_padding_that_the_layout_does_not_promise_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, input_ids=[[1, 2]], attention_mask=[[0, 1]])
    with pytest.raises(UsageError, match="padding on the left, which this layout does not"):
        own_cases("llama/genai", path)


def test_a_token_that_only_ones_own_prompt_has_shows_a_wrong_row_and_replays(tmp_path):
    """Random ids of few cases may miss a row of the embeddings."""
    prompt = tmp_path / "p.json"
    prompt.write_text("[17, 3]")
    graphs = shutil.copytree(EXPORTS / "gpt2" / "mobius", tmp_path / "graphs")
    out = tmp_path / "out"
    report = compare_models(
        EXPORTS / "gpt2" / "checkpoint", graphs, RUN, inputs=[str(prompt)], output=out
    )
    assert report.passed
    assert f"own inputs: 1 prompt of {prompt}, each alone" in " ".join(report.notes)
    golden = {each.case.name: each for each in read_golden(out / "model" / "golden")}
    assert golden["own_inputs_1"].case.sizes["query_len"] == 2
    model = onnx.load(out / "model" / "model.onnx")
    weight = next(x for x in model.graph.initializer if "wte" in x.name)
    array = numpy_helper.to_array(weight).copy()
    array[17, 3] += 0.1
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    assert "own_inputs_1" in failed(verify(out / "model", RUN, graph=tmp_path / "wrong.onnx"))


@pytest.mark.parametrize("cache", ["in-place", "append"])
@pytest.mark.every(2)
def test_graphs_that_were_built_are_judged_by_ones_own_prompts(ids, cache):
    subject: Any = subject_of_model(EXPORTS / "llama" / "checkpoint", cache=cache)
    maker = subject.maker()
    own = read_own([str(ids)], [maker.entry], subject.module.model, None)
    cases = [*own.cases(maker, frozenset({"batch"}), pads_any=cache == "in-place")]
    assert len(cases) == (4 if cache == "in-place" else 3)
    for case in cases:
        query = case.inputs["input_ids"].shape[1]
        assert case.inputs["logit_index"][0].tolist() == [*range(query)]
        assert subject.own_oracle().golden(case).expected["logits"].shape[1] == query


@pytest.mark.parametrize(
    "inputs",
    [
        lambda path: path,
        lambda path: str(path),
        lambda _: PROMPTS,
        lambda _: lambda: iter(PROMPTS),
        lambda _: [torch.tensor(each) for each in PROMPTS],
        lambda _: [{"input_ids": np.array([each])} for each in PROMPTS],
    ],
    ids=["path", "str", "ids", "function", "tensors", "arrays"],
)
def test_python_takes_what_files_hold(ids, inputs):
    cases = own_cases("llama/mobius", inputs(ids))
    alone = [cases[f"own_inputs_{number}"].inputs["input_ids"].tolist() for number in (1, 2, 3)]
    assert alone == [[each] for each in PROMPTS]


def test_parity_of_a_model_is_asserted_on_ones_own_inputs(tmp_path):
    checkpoint, graphs = EXPORTS / "llama" / "checkpoint", EXPORTS / "llama" / "mobius"
    report = assert_parity(checkpoint, [PROMPTS[0]], graphs=graphs, runtimes=["ort-cpu"])
    assert "own_inputs_1" in {verdict.case for verdict in report.verdicts}
    with pytest.raises(UsageError, match=r"given in Python: prompt 2 is 2\.5; give"):
        assert_parity(checkpoint, [[1], 2.5], graphs=graphs, runtimes=["ort-cpu"])
    with pytest.raises(UsageError, match="axes are those of a module"):
        assert_parity(checkpoint, [[1]], {}, graphs=graphs)
    with pytest.raises(UsageError, match="inputs are those of a module"):
        assert_parity(tmp_path, [[1]])
