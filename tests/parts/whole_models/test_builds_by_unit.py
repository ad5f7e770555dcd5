"""Builds of large models, whose weights are read a unit at a time: the same graphs and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_decoders import tiny_decoder

from attn_export import Subject
from attn_export.commands.build import build
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.verify import verify
from attn_export.errors import WeightsError
from attn_export.export.export import export
from attn_export.graph import ir_helpers
from attn_export.graph.save import save_graphs
from attn_export.graph.unread import Unread, reader
from attn_export.parts.whole_models import model_checkpoint, model_oracle, unit_weights

SMALL, WIDENED, SIZE = 128, 2**11, 64
"""Elements of weights that stay in memory here, and from which they lie in files if computed; and
the width of the models."""


def extended(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.extended)


def files_of(folder: Path, checkpoint: Path, dtype: str, layers: str) -> dict[str, bytes]:
    """Return the graphs and weights of a checkpoint by name."""
    folder.mkdir()
    integers = {"weights_dtype": dtype} if dtype.startswith("int") else {"dtype": dtype}
    subject = Subject.from_model(checkpoint, layers=layers, **integers)
    graphs, _ = lower_all(export(subject), ("standard", "ort"))
    save_graphs({graph.file.name: graph.model for graph in graphs}, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("kind", "dtype", "fields"), [
    ("gemma2", "float32", {}),  # tied, offsets of norms
    ("llama", "float16", {"tie_word_embeddings": True, "attention_bias": True}),  # packed
    ("llama/1-1", "float32", {}),  # one layer
    extended("mixtral", "float32", {}),  # experts
    extended("phi3", "float32", {}),  # packed in the checkpoint
    extended("gpt2", "float16", {}),  # stored [in, out]
    extended("qwen3", "bfloat16", {}),  # computed in float32
    ("qwen2", "int4", {"tie_word_embeddings": True}),  # the output layer gets a weight of its own
    extended("gpt2", "int8", {}),
])  # fmt: skip
def test_graphs_and_weights_are_those_of_a_build_in_memory(
    kind: str, dtype: str, fields: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    # In float32, so that narrower types round them.
    kind, _, layers = kind.partition("/")
    tiny_decoder(kind, **fields).save_pretrained(checkpoint)
    whole = files_of(tmp_path / "whole", checkpoint, dtype, layers)
    monkeypatch.setattr(model_checkpoint, "LARGE", 0)
    monkeypatch.setattr(unit_weights, "_SMALL", SMALL)
    monkeypatch.setattr(unit_weights, "_WIDENED", WIDENED)
    monkeypatch.setattr(ir_helpers, "_LARGE", WIDENED)
    by_unit = files_of(tmp_path / "by_unit", checkpoint, dtype, layers)
    assert {n: x for n, x in by_unit.items() if x != whole.get(n)} == {}
    assert len(by_unit) == len(whole) >= 3


def test_bundles_of_models_whose_evidence_does_not_fit_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is at real vocabularies and depths: of some cases not one position is stored."""
    tiny_decoder("llama").save_pretrained(tmp_path / "checkpoint")
    monkeypatch.setattr(model_oracle, "LARGE", 0)
    monkeypatch.setattr(model_oracle, "MOST_BYTES", 1)
    run: Any = {"runtimes": ["ort-cpu"]}
    subject = Subject.from_model(tmp_path / "checkpoint")
    report = build(subject, tmp_path / "bundle", dialects=["standard"], **run)
    assert any(note.startswith("stored evidence") for note in report.notes)
    again = verify(tmp_path / "bundle", **run)
    assert again.passed, str(again)


def test_a_checkpoint_that_changes_meanwhile_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_decoder("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(model_checkpoint, "LARGE", 0)
    monkeypatch.setattr(unit_weights, "_SMALL", SMALL)
    subject = Subject.from_model(tmp_path)
    model = export(subject).model
    value = model.graph.initializers["model.model.embed_tokens.weight"].const_value
    assert value is not None
    before = value.numpy()
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    for read in (value.numpy, lambda: subject.call(subject.module, subject.inputs)):
        with pytest.raises(WeightsError, match="safetensors was changed while it was read"):
            read()
    assert before.shape == (64, 64)


def test_views_of_unread_arrays_are_read_as_views_of_their_numbers() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    unread = Unread(numbers.nbytes, lambda rows: numbers[rows])
    here = np.frombuffer(unread.pages, np.float32).reshape(4, 6)
    for view in (lambda x: x, lambda x: x.T, lambda x: x[1:3, ::2], lambda x: x.reshape(2, 12).T):
        assert not view(here).any()
        np.testing.assert_array_equal(reader(view(here))(), view(numbers))
    other = np.ones(3)
    assert reader(other)() is other


@pytest.mark.parametrize("options", [
    extended({"dtype": "float16"}),  # judged in float32, too
    {"weights_dtype": "int4", "fit": True},  # and its distance from the weights before
], ids=str)  # fmt: skip
def test_reports_are_those_of_builds_in_memory(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    tiny_decoder("gemma2").save_pretrained(checkpoint)  # tied
    monkeypatch.setattr(model_oracle, "LARGE", 0)  # as few cases are tried of large models
    reports = []
    for name in ("whole", "by_unit"):
        subject = Subject.from_model(checkpoint, **options)
        assert (subject.unread is not None) == (name == "by_unit")
        run: Any = {"dialects": ["ort"], "runtimes": ["ort-cpu"]}
        run |= {"budgets": ["sqnr>=20.5"]} if "fit" in options else {}
        reports.append(build(subject, tmp_path / name, **run))
        monkeypatch.setattr(model_checkpoint, "LARGE", 0)
        monkeypatch.setattr(unit_weights, "_SMALL", SMALL)
        # Layers are several units, and each weight is widened as in memory.
        monkeypatch.setattr(unit_weights, "_WIDENED", 4 * WIDENED)
    whole, by_unit = reports
    assert whole.passed
    assert by_unit.passed
    assert by_unit.quality == whole.quality
    assert whole.quality is None or whole.quality.kept
    assert by_unit.notes == whole.notes
    assert [v.case for v in by_unit.verdicts] == [v.case for v in whole.verdicts]
