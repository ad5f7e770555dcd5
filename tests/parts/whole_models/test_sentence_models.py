"""Folders of sentence-transformers: built as one graph, judged, explained, and run on texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from sentence_folders import DENSE, LAST, MEAN, add_tokenizer, sentence_folder
from shared import once
from test_built_models import worst_error
from torch.nn import functional as F

from attn_export import Subject, build
from attn_export.bundle.text_inputs import VECTOR, TextInputs, text_inputs_of
from attn_export.commands.main import run
from attn_export.errors import UsageError, WeightsError
from attn_export.explain.explanation import SearchWork
from attn_export.parts.whole_models import embedding
from attn_export.parts.whole_models.embedding import Embedder
from attn_export.parts.whole_models.export_layouts import End, Entry
from attn_export.parts.whole_models.faults.model_search import find_cause
from attn_export.parts.whole_models.loaded_model import load_model
from attn_export.parts.whole_models.model_reference import reference_of
from attn_export.parts.whole_models.sentence_folder import read_sentence_folder
from attn_export.parts.whole_models.sentence_model import POOLINGS
from attn_export.quality import FLOATING
from attn_export.reference.float64_mode import widened_copy

NORM = (("Normalize", {}),)
ALL = {"embedding_dimension": 32, "pooling_mode": [*POOLINGS]}

# -- what poolings mean -------------------------------------------------------------------------

MEANINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda x: x[0], "max": lambda x: x.max(0), "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: np.average(x, 0, np.arange(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}  # fmt: skip


@pytest.mark.parametrize("mode", POOLINGS)
def test_poolings_are_those_of_the_tokens_without_padding_on_either_side(mode):
    x = np.random.default_rng(0).standard_normal((2, 7, 3))
    for at in (slice(0, 4), slice(3, 7)):
        mask = np.zeros((2, 7), int)
        mask[0], mask[1, at] = 1, 1
        pooled = POOLINGS[mode](torch.tensor(x), torch.tensor(mask)).numpy()
        np.testing.assert_allclose(pooled[0], MEANINGS[mode](x[0]))
        np.testing.assert_allclose(pooled[1], MEANINGS[mode](x[1, at]))


# -- builds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "architecture", "pooling", "layers"),
    [
        ("bert", "BertForMaskedLM", ALL, (("Dense", {**DENSE, "in_features": 192}), *NORM)),
        ("llama", "LlamaForCausalLM", LAST, NORM), ("mpnet", "", MEAN, NORM),
        ("deberta-v2", "", MEAN, ()),
    ],
    ids=["all", "decoder", "mpnet", "deberta"],
)  # fmt: skip
def test_a_folder_is_one_module_that_gives_the_vector(
    kind, architecture, pooling, layers, tmp_path
):
    folder = sentence_folder(tmp_path / "model", pooling, layers, kind, architecture)
    subject = Subject.from_model(folder)
    assert subject.outputs == (VECTOR,)
    error, case = worst_error(subject, 12)
    assert error < 5e-6, case
    padded = [case for case in subject.plan().cases if case.name.startswith(("left_", "right_"))]
    assert padded
    assert all(case.judged_rows[VECTOR] == case.ignored_rows for case in padded)


def built(kind: str = "bert") -> Path:
    """Return a bundle of a tiny folder with a tokenizer, built once; decoders pad on the left."""

    def make(folder: Path) -> None:
        pooling = MEAN if kind == "bert" else LAST
        model = sentence_folder(Path(f"{folder}.model"), pooling, kind=kind, num_hidden_layers=1)
        add_tokenizer(model)
        (model / "config_sentence_transformers.json").write_text('{"prompts": {"query": "a b "}}')
        if pooling is LAST:
            config = '{"padding_side": "left", "model_max_length": 1000000000000000019884624838656}'
            (model / "tokenizer_config.json").write_text(config)
        options = ("-o", str(folder), "--runtime", "ort-cpu", "--dialect", "ort", "--quiet")
        assert run(["build", "--model", str(model), *options]) == 0

    return once(f"models/sentences_{kind}", make)


def expected(kind: str, ids: list[int]) -> np.ndarray:
    """Return the vector of transformers' tokens, pooled here."""
    model, _ = load_model(Path(f"{built(kind)}.model"))
    with torch.inference_mode():
        tokens = model.transformer(input_ids=torch.tensor([ids])).last_hidden_state
        pooled = tokens.mean(1) if kind == "bert" else tokens[:, -1]
        return np.asarray(F.normalize(pooled, dim=-1)[0])


def test_weights_of_an_encoder_are_integers_within_a_budget(tmp_path):
    folder = sentence_folder(tmp_path / "model", MEAN, (("Dense", DENSE), *NORM))
    subject = Subject.from_model(folder, weights_dtype="int8")
    report = build(
        subject, tmp_path / "out", dialects=["standard"], runtimes=["ort-cpu"],
        budgets=["cosine>=0.99"],
    )  # fmt: skip
    assert report.passed, str(report)
    assert {x.part for x in report.quality.outputs} >= {VECTOR}
    assert all(0.99 < x.cosine < 1 for x in report.quality.outputs)
    nodes = [node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node]
    assert nodes.count("DequantizeLinear") == 2 * 4 + 1  # q, k and v are packed
    kept = Subject.from_model(folder, weights_dtype="int8", keep="dense_2").kept
    assert kept == {"dense_2.linear": FLOATING}


TEXTS = ("a b c", "z", "A b c d e f g h i j k l m n", "", "c a")
IDS = ([1, 4, 5, 6, 2], [1, 29, 2], [1, *range(4, 14), 2], [1, 2], [1, 6, 4, 2])
"""What the texts are in tokens: in lower case, and cut to 12."""


@pytest.mark.parametrize(("kind", "batch_size"), [("bert", 1), ("bert", 2), ("llama", 3)])
def test_vectors_of_texts_are_in_their_order_whatever_the_batches(kind, batch_size):
    embedder = Embedder(built(kind), threads=1)
    rows = embedder.of_texts([(text,) for text in TEXTS], batch_size)
    assert embedder.cut == 1
    for row, ids in zip(rows, IDS, strict=True):
        np.testing.assert_allclose(row, expected(kind, [*ids]), atol=2e-6)


def test_the_command_embeds_files_texts_and_ids(tmp_path, capsys, monkeypatch):
    file, saved = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    file.write_text("\n".join(TEXTS))
    assert run(["embed", str(built()), str(file), "-o", str(saved)]) == 0
    assert "1 text of 5 cut" in capsys.readouterr().err
    vectors = np.load(saved, allow_pickle=False)
    assert vectors.shape == (5, 32)
    same = ("--text", "a b c"), ("--ids", "1,4,5,6,2"), ("--prompt", "query", "--text", "c")
    for options in same:
        assert run(["embed", str(built()), *options]) == 0
        found = json.loads(capsys.readouterr().out)
        np.testing.assert_allclose(found, vectors[0], atol=1e-6)
    assert run(["embed", str(built()), "--text", "a b c", "--sigmoid"]) == 0
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-vectors[0])), atol=1e-6)


@pytest.mark.parametrize(
    ("tokenizer", "sentence", "expected"),
    [
        ({}, {}, TextInputs(512, 64)),
        ({"model_max_length": 1e30, "padding_side": "left"}, {},
         TextInputs(512, 64, 0, "left")),
        ({"model_max_length": 128}, {"max_seq_length": None}, TextInputs(128, 64)),
        ({"model_max_length": 128}, {"max_seq_length": 256, "do_lower_case": True},
         TextInputs(256, 64, 0, "right", True)),
    ],
)  # fmt: skip
def test_texts_are_cut_and_padded_as_the_checkpoint_says(tokenizer, sentence, expected, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(sentence))
    assert text_inputs_of(tmp_path, 512, 64, 0) == expected


def test_the_default_prompt_is_that_of_the_checkpoint(tmp_path):
    said = {"prompts": {"query": "q: ", "text": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    found = text_inputs_of(tmp_path, 512, 64, 0)
    assert (found.prompts, found.prompt) == (said["prompts"], "query")


def test_texts_of_about_one_length_run_together():
    lengths = [3, 100, 4, 80, 70, 4, 4]
    assert [*embedding._batches(lengths, 3)] == [[1, 3], [4], [2, 5, 6], [0]]


def test_pairs_have_token_types():
    embedder = Embedder(built(), threads=1)
    ids, types = [1, 4, 2, 5, 6, 2], [0, 0, 0, 1, 1, 1]
    pair = embedder.of_texts([("a", "b c")])[0]
    np.testing.assert_allclose(pair, embedder.of_ids([ids], [types])[0], atol=1e-6)
    assert np.abs(pair - embedder.of_ids([ids])[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--ids", "1,64"), "text 1 has 64; give 0 to 63"),
        (("--ids", "1,-1"), "text 1 has -1; give 0 to 63"),
        (("--ids", ",".join(["1"] * 13)), "text 1 has 13 tokens; give 1 to 12"),
        (("--ids", "1;2"), "ids are token ids with commas"),
        (("--prompt", "b", "--text", "a"), "there is no prompt b; choose from query"),
        (("--prompt", "query", "--ids", "1"), "--prompt is put before texts"),
        (("--pairs", "--text", "a b"), "has 0 tabs; give one"),
        (("--text", "a", "--ids", "1"), "embed takes one of FILE, --text and --ids"),
        (("nowhere.txt",), "cannot read nowhere.txt"),
    ],
)
def test_wrong_texts_and_ids_are_one_line(options, says, capsys):
    assert run(["embed", str(built()), *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


# -- refusals -----------------------------------------------------------------------------------


def _modules(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "modules.json"
        modules = json.loads(path.read_text())
        change(modules)
        path.write_text(json.dumps(modules))

    return edit


def _json(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def _pickled(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (_modules(lambda m: m[2].update(type="mine.Layer")), "mine.Layer is not supported"),
    "unknown": (
        _modules(lambda m: m[2].update(type="sentence_transformers.models.CNN")),
        "CNN is not supported",
    ),
    "order": (_modules(lambda m: m.reverse()), "supported are Transformer, Pooling, and then"),
    "outside": (_modules(lambda m: m[1].update(path="../other")), "no folder inside it"),
    "kwargs": (_modules(lambda m: m[0].update(kwargs=["task"])), "takes kwargs"),
    "prompt": (_json("1_Pooling/config.json", include_prompt=False), "include_prompt is false"),
    "mode": (_json("1_Pooling/config.json", pooling_mode="median"), "'median' is none of cls"),
    "activation": (_json("2_Dense/config.json", activation_function="os.system"), "'os.system'"),
    "residual": (_json("2_Dense/config.json", use_residual=True), "use_residual is not supported"),
    "input": (_json("2_Dense/config.json", module_input_name="x"), "x is not supported"),
    "width": (_json("2_Dense/config.json", in_features=31), "in_features is 31"),
    "shape": (_json("2_Dense/config.json", out_features=16), "its config says linear.weight"),
    "task": (
        _json("sentence_bert_config.json", transformer_task="fill-mask"),
        "transformer_task 'fill-mask' is not supported",
    ),
    "pickle": (_pickled, "holds pickles only"),
    "no list": (lambda folder: (folder / "modules.json").write_text("{}"), "Expected `array`"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_unknown_in_a_folder_is_refused_in_one_line(name, tmp_path):
    edit, says = REFUSED[name]
    folder = sentence_folder(tmp_path / "model", MEAN, (("Dense", DENSE), *NORM))
    edit(folder)
    with pytest.raises((UsageError, WeightsError)) as raised:
        Subject.from_model(folder)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_of_a_cross_encoder_is_a_checkpoint_as_any_other(tmp_path):
    folder = sentence_folder(tmp_path / "model", MEAN)
    _modules(lambda modules: modules.__delitem__(slice(1, 3)))(folder)
    _json("sentence_bert_config.json", transformer_task="sequence-classification")(folder)
    assert read_sentence_folder(folder) is None


# -- causes -------------------------------------------------------------------------------------


def _pooling(mode: str) -> Callable[[Any], None]:
    return lambda model: setattr(model.pooling, "modes", (mode,))


def _forward(name: str, change: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(name), "forward", change)


def _over_padding(model: Any) -> None:
    own = model.pooling.forward
    model.pooling.forward = lambda tokens, mask: own(tokens, torch.ones_like(mask))


CAUSES: dict[str, tuple[dict[str, Any], Callable[[Any], None], str]] = {
    "mean over padding": (MEAN, _over_padding, "pooling reads padding, too"),
    "CLS for mean": (MEAN, _pooling("cls"), "pooling takes the first token where"),
    "mean for CLS": (
        {"pooling_mode": "cls"}, _pooling("mean"), "pooling takes the mean where the folder",
    ),
    "last slot": (LAST, _over_padding, "pooling reads padding, too"),
    "last of right padding": (
        LAST, _forward("pooling", lambda x, m: x[torch.arange(len(m)), m.sum(1) - 1]),
        "pooling takes the token at the number of tokens",
    ),
    "no normalisation": (MEAN, _forward("normalize_3", lambda x: x), "normalize_3 is missing"),
    "no dense": (MEAN, _forward("dense_2", lambda x: x), "dense_2 is missing"),
}  # fmt: skip
"""Poolings, what is done wrong, and what is said of it."""


@pytest.mark.parametrize("name", CAUSES)
def test_the_fault_of_a_wrong_vector_is_named(name, tmp_path):
    pooling, change, says = CAUSES[name]
    folder = sentence_folder(tmp_path / "model", pooling, (("Dense", DENSE), *NORM))
    right, wrong = (load_model(folder)[0] for _ in range(2))
    change(wrong)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 64, (3, 9)))
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [1] * 6 + [0] * 3])

    def outputs(model: Any) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            return {VECTOR: model(input_ids=ids, attention_mask=mask)[VECTOR].double().numpy()}

    cause = find_cause(widened_copy(right), outputs, outputs(wrong), SearchWork(60).is_over)
    assert cause is not None
    assert says in cause.sentence


def test_graphs_of_others_may_give_the_vector_or_the_tokens_alone(tmp_path):
    model, _ = load_model(sentence_folder(tmp_path / "model", MEAN))
    shapes = {VECTOR: ("b", 32), "token_embeddings": ("b", "s", 32), "last_hidden_state": ()}
    inputs = {
        name: End(name, role, "int64", ("b", "s"))
        for name, role in (("input_ids", "ids"), ("attention_mask", "mask"))
    }  # fmt: skip
    for names in ([VECTOR, "token_embeddings"], ["last_hidden_state"]):
        ends = {n: End(n, "value", "float32", shapes[n] or ("b", "s", 32), usual=n) for n in names}
        entry = Entry(tmp_path / "model.onnx", "model", "", inputs, ends)
        reference = reference_of(model, entry, frozenset({"batch", "left", "right"}))
        assert [*reference.interface.output_shapes] == names
