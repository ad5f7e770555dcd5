"""The fewest bytes of wider weights with which a budget holds."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from tiny_decoders import tiny_decoder

from attn_export import Subject, build, verify
from attn_export.bundle.manifest import read_manifest
from attn_export.commands.bundle_graphs import lower_all
from attn_export.errors import UsageError
from attn_export.export.export import export
from attn_export.quality import Budget
from attn_export.runtimes.run_options import Progress

PROMPTS = np.random.default_rng(0).integers(3, 64, (3, 12)).tolist()
PROGRESS = Progress()


def budgets_of(*texts: str) -> list[Budget]:
    return [Budget.parse(text) for text in texts]


def of_integers(kind: str, *, layers: int = 1, **options: Any) -> Any:
    fields = {"num_hidden_layers": layers}
    model = tiny_decoder(kind, **fields, **({"n_layer": layers} if kind == "gpt2" else {}))
    return Subject.from_model(model, weights_dtype="int4", max_len=16, **options)


@pytest.fixture(scope="module")
def search() -> Any:
    """Return a function that returns a search in a model, whose weights are as before rounding."""
    subject = of_integers("gpt2", inputs=[PROMPTS])
    oracle = subject.own_oracle()
    inputs = [case.inputs for case in subject.plan().cases if "own_inputs_1_to" in case.name]
    with oracle.fitting(inputs, (), PROGRESS) as fit:
        yield lambda *texts: dataclasses.replace(fit, budgets=budgets_of(*texts))


@pytest.mark.parametrize(
    "budget", ["sqnr>=21.5", "sqnr>=23", "sqnr>=48", "kl<=0.0001", "row<=0.12"]
)
def test_no_other_choice_of_integers_holds_the_budget_with_many_fewer_bytes(search, budget):
    fit = search(budget)
    kept = fit.kept()
    assert kept
    assert not fit.missed(kept)
    assert fit.missed({})
    if "none" in kept.values():
        assert fit.missed(dict.fromkeys(fit._paths, "int8"))
        return
    sizes = [
        fit.size(dict.fromkeys(some, "int8"))
        for count in range(len(fit._paths))
        for some in itertools.combinations(fit._paths, count)
        if not fit.missed(dict.fromkeys(some, "int8"))
    ]
    least = fit.size({})
    assert fit.size(kept) - least <= 1.2 * (min(sizes, default=fit.size(kept)) - least)


def test_a_budget_that_nothing_rounded_holds_is_refused(search):
    with pytest.raises(UsageError, match=r"sqnr>=200 holds only if every weight stays floating"):
        search("sqnr>=200").kept()
    assert search("sqnr>=1").kept() == {}


def test_a_fitted_build_holds_the_budget_and_says_what_is_kept(tmp_path):
    subject = of_integers("llama", inputs=[PROMPTS], fit=True)
    run: Any = {"dialects": ["ort", "standard"], "runtimes": ["ort-cpu"]}
    report = build(subject, tmp_path / "out", budgets=["sqnr>=22"], **run)
    assert report.passed
    kept = report.quality.kept
    assert 0 < len(kept) < 8
    assert {*kept.values()} == {"int8"}
    assert any("fitted to sqnr>=22 in" in note for note in report.notes)
    replayed = verify(tmp_path / "out", runtimes=["ort-cpu"])
    assert replayed.quality.kept == read_manifest(tmp_path / "out").kept == kept
    assert any(note.startswith("kept in int8: ") for note in replayed.notes)
    # What is measured is the user's, each prompt once.
    cases = [case.name for case in subject.plan().cases]
    measured = json.loads((tmp_path / "out/golden/quality.json").read_text())["cases"]
    assert [cases[at] for at in measured] == [f"own_inputs_{n}" for n in (1, 2, 3)]
    with pytest.raises(UsageError, match="were fitted before"):
        subject.fit(budgets_of("sqnr>=22"), PROGRESS)


def test_weights_that_are_fitted_are_those_that_are_kept_by_hand():
    fitted = of_integers("gpt2", fit=True).fit(budgets_of("sqnr>=21.5"), PROGRESS)
    by_hand = of_integers("gpt2", keep=fitted.kept)
    assert fitted.kept == by_hand.kept
    assert by_hand.kept
    ours, theirs = (
        lower_all(export(subject), ("standard",))[0][0].model.graph.initializers
        for subject in (fitted, by_hand)
    )
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        np.testing.assert_array_equal(value.const_value.numpy(), theirs[name].const_value.numpy())


def test_reference_that_is_computed_anew_is_of_the_same_types(tmp_path):
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "out"
    tiny_decoder("llama", num_hidden_layers=1).save_pretrained(checkpoint)
    options = 'weights_dtype="int4", max_len=16'
    (tmp_path / "mine.py").write_text(
        f"from attn_export import Subject\nFOLDER = {str(checkpoint)!r}\n"
        f"def same():\n    return Subject.from_model(FOLDER, {options}, keep='lm_head=int8')\n"
        f"def other():\n    return Subject.from_model(FOLDER, {options})\n"
    )
    kept = Subject.from_model(checkpoint, weights_dtype="int4", max_len=16, keep="lm_head=int8")
    run: Any = {"runtimes": ["ort-cpu"]}
    assert build(kept, bundle, dialects=["standard"], **run).passed
    assert verify(bundle, recompute=True, module=f"{tmp_path / 'mine.py'}:same", **run).passed
    with pytest.raises(UsageError, match=r"one type; in the bundle kept in int8: lm_head"):
        verify(bundle, recompute=True, module=f"{tmp_path / 'mine.py'}:other", **run)
