"""One bundle in all runtimes: correct graphs pass in each, and wrong graphs fail in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shared import always, bundle_of, extended, spec_of

from attn_export import verify
from attn_export.graph.load import load_graph
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graphs
from attn_export.results import BASE
from attn_export.runtimes.catalogue import all_names, runtime

pytestmark = pytest.mark.xdist_group("test_every_runtime")  # what it builds is shared

ALWAYS = {*always()}
"""Runtimes in the default tests; scripts/matrix runs the others."""

Need = Callable[[str], None]


@pytest.fixture(scope="module")
def bundle() -> Path:
    """Return a bundle in all dialects, appending."""
    return bundle_of("append")


@pytest.fixture(scope="module")
def wrong(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same graphs with a wrong softmax scale, that of a head dimension larger by 1."""
    folder = tmp_path_factory.mktemp("wrong")
    model = load_graph(bundle / "model.onnx")
    for node in model.graph:
        if node.op_type == "Attention":
            head_dim = spec_of("append").head_dim
            node.attributes.add(_float("scale", (head_dim + 1) ** -0.5))
    graphs = {"model.onnx": model}
    for dialect in ("portable", "ort"):
        for phase, form in lower(model, dialect).items():
            graphs[".".join(filter(None, ["model", dialect, phase, "onnx"]))] = form.model
    save_graphs(graphs, folder)
    return folder


def _float(name: str, value: float) -> object:
    import onnx_ir as ir

    return ir.AttrFloat32(name, value)


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_it_passes_in_every_form_that_it_runs(name: str, bundle: Path, need: Need):
    need(name)
    report = verify(bundle, runtimes=[name])
    of_it = [run for run in report.runs if run.runtime == name]
    assert report.passed, [run.reason for run in of_it] + [
        v.message for v in report.verdicts if v.status != "passed"
    ][:3]
    assert any(run.outcome == "ran" for run in of_it)
    assert all(run.reason for run in of_it if run.outcome == "not run")


FORMS = ("model.onnx", "model.portable.onnx", "model.ort.onnx")
PAIRS = [(name, form) for name in sorted(ALWAYS) for form in FORMS]
SLOW = {("wasm", "model.portable.onnx"), ("wasm", "model.ort.onnx")}
"""Graphs that only `--all` runs in a browser: Node.js runs all of them with the same code."""


@pytest.mark.parametrize("pair", extended(PAIRS, lambda pair: pair not in SLOW), ids="-".join)
@pytest.mark.every(3)
def test_a_wrong_scale_is_seen_in_every_form_that_it_runs(
    pair: tuple[str, str], bundle: Path, wrong: Path, need: Need
):
    name, form = pair
    need(name)
    report = verify(bundle, graph=wrong / form, runtimes=[name], cases=[BASE])
    run = next(run for run in report.runs if run.runtime == name)
    if run.outcome == "not run":
        assert run.reason
        return
    assert run.outcome == "ran"
    failed = [v for v in report.verdicts if v.runtime == name and v.status == "failed"]
    assert failed
    assert report.exit_code == 6


@pytest.mark.parametrize("name", all_names())
def test_a_runtime_is_found_by_its_name_and_once(name: str):
    assert runtime(name).name == name
    assert runtime(name) is runtime(name)
