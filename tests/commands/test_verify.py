"""`verify`: with other graphs, with damaged bundles, and without torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Cli
from onnx import numpy_helper
from shared import bundle_of, swapped_bundle

from attn_export import verify
from attn_export.bundle.golden import stored_cases
from attn_export.bundle.manifest import GOLDEN, manifest_content, read_manifest, write_manifest
from attn_export.commands.recompute import STORED
from attn_export.errors import BundleError, GraphError, SpecError, UsageError
from attn_export.results import Report
from attn_export.runtimes.run_options import Progress


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """Return a bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def failed_cases(report: Report) -> set[str]:
    return {verdict.case for verdict in report.verdicts if verdict.status == "failed"}


def changed_graph(bundle: Path, target: Path, change) -> Path:
    model = onnx.load(bundle / "model.onnx")
    change(model.graph)
    onnx.save(model, target)
    return target


def attention_of(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == "Attention")


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def wrong_scale(graph: onnx.GraphProto) -> None:
    attribute(attention_of(graph), "scale").f = 1 / np.sqrt(9)  # D is 8


def replace_output(graph: onnx.GraphProto, op: str, *operands: float) -> str:
    """Rename the output, add the operands as constants, and return the new name of the output."""
    for node in graph.node:
        node.output[:] = ["raw" if name == "output" else name for name in node.output]
    for number, value in enumerate(operands):
        array = np.array(value, np.float32)
        graph.initializer.append(numpy_helper.from_array(array, f"{op}_{number}"))
    return "raw"


def nan_to_zero(graph: onnx.GraphProto) -> None:
    raw = replace_output(graph, "Where", 0.0)
    graph.node.append(onnx.helper.make_node("IsNaN", [raw], ["is_nan"]))
    graph.node.append(onnx.helper.make_node("Where", ["is_nan", "Where_0", raw], ["output"]))


def infinity_to_largest(graph: onnx.GraphProto) -> None:
    largest = float(np.finfo(np.float32).max)
    raw = replace_output(graph, "Clip", -largest, largest)
    graph.node.append(onnx.helper.make_node("Clip", [raw, "Clip_0", "Clip_1"], ["output"]))


def one_output_less(graph: onnx.GraphProto) -> None:
    del graph.output[2]


def one_input_more(graph: onnx.GraphProto) -> None:
    graph.input.append(onnx.helper.make_tensor_value_info("more", 1, ["batch"]))


def other_dtype(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def other_width(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.shape.dim[2].dim_value = 33


def other_rank(graph: onnx.GraphProto) -> None:
    graph.output[0].type.tensor_type.shape.dim.add().dim_value = 1


def a_name_that_rings(graph: onnx.GraphProto) -> None:
    graph.output[0].name = "out\x1b[31m\x07put"


@pytest.mark.parametrize("change", [nan_to_zero, infinity_to_largest])
def test_another_graph_with_a_planted_fault_is_a_mismatch(change, bundle: Path, tmp_path: Path):
    graph = changed_graph(bundle, tmp_path / "other.onnx", change)
    report = verify(bundle, graph=graph, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    assert failed_cases(report)
    assert all(v.graph == "other.onnx" for v in report.verdicts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_output_less, "has the outputs output, present_key; those of the bundle are output, "),
        (one_input_more, "has the inputs query, attn_mask, past_key, past_value, more; those"),
        (other_dtype, "query is float16; in the bundle it is float32"),
        (other_width, "query has the shape ['batch', 'query_len', 33]; in the bundle"),
        (other_rank, "output has the shape ['batch', 'query_len', 32, 1]; in the bundle"),
        (a_name_that_rings, r"has the outputs 'out\x1b[31m\x07put', present_key"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_graph_with_other_inputs_or_outputs_is_one_line_up_front(
    change, message: str, bundle: Path, tmp_path: Path, cli: Cli
):
    graph = changed_graph(bundle, tmp_path / "other.onnx", change)
    got = cli("verify", bundle, "--graph", graph)
    assert got.returncode == 4
    assert got.stdout == ""
    assert message in got.stderr
    assert got.stderr.count("\n") == 1


def test_a_graph_under_the_name_of_one_for_one_query_is_judged_by_all_cases(tmp_path: Path):
    folder, graph = swapped_bundle(), tmp_path / "model.ort.decode.onnx"
    shutil.copy(folder / "model.ort.onnx", graph)
    shutil.copy(next(folder.glob("*.safetensors")), tmp_path)
    report = verify(folder, graph=graph, runtimes=["ort-cpu"])
    judged = {verdict.case for verdict in report.verdicts}
    assert judged == {case.name for case in stored_cases(folder / "golden")[1]}
    assert report.passed


def test_a_graph_of_fixed_sizes_is_judged_by_the_cases_that_it_takes(bundle: Path, tmp_path: Path):
    def one_row(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 1

    graph = changed_graph(bundle, tmp_path / "one.onnx", one_row)
    report = verify(bundle, graph=graph, runtimes=["ort-cpu"])
    assert report.passed
    _, cases = stored_cases(bundle / "golden")
    assert {v.case for v in report.verdicts} == {c.name for c in cases if c.sizes["batch"] == 1}


@pytest.mark.parametrize("content", [b"", b"not onnx", None], ids=["empty", "text", "truncated"])
def test_a_graph_that_cannot_be_read_is_a_graph_error(content, bundle: Path, tmp_path: Path):
    graph = tmp_path / "broken.onnx"
    whole = (bundle / "model.onnx").read_bytes()
    graph.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(GraphError, match=r"broken\.onnx") as caught:
        verify(bundle, graph=graph, runtimes=["ort-cpu"])
    assert "\n" not in str(caught.value)


def test_a_graph_that_does_not_exist_is_wrong_use(bundle: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        verify(bundle, graph=tmp_path / "no.onnx")


FILES = [
    "model.onnx", "manifest.json", "report.json", "spec.toml", "golden/index.json",
    "golden/test_data_set_0/input_0.pb", "golden/test_data_set_3/output_1.pb",
    "golden/test_data_set_7/eager_0.pb",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.01, 0.5, 0.99])
def test_a_changed_byte_anywhere_is_a_damaged_bundle(name: str, where: float, copy: Path):
    content = bytearray((copy / name).read_bytes())
    content[int(len(content) * where)] ^= 0x01
    (copy / name).write_bytes(content)
    with pytest.raises(BundleError) as caught:
        verify(copy, runtimes=["ort-cpu"])
    assert Path(name).name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_damaged_bundle(name: str, copy: Path):
    (copy / name).unlink()
    with pytest.raises(BundleError):
        verify(copy, runtimes=["ort-cpu"])


def test_a_manifest_of_another_format_or_edited_by_hand_is_refused(copy: Path):
    manifest = json.loads((copy / "manifest.json").read_text())
    for change in ({"format": "attn-export-bundle/0"}, {"name": "another"}):
        (copy / "manifest.json").write_text(json.dumps({**manifest, **change}, indent=1) + "\n")
        with pytest.raises(BundleError):
            verify(copy)


TUNED = {"processor": "one", "threads": 2, "milliseconds": {"prefill": {"kernels": 1.5}}}


@pytest.mark.parametrize("form", [None, "products"])  # which `tune` of earlier versions wrote
def test_a_manifest_is_written_again_with_its_order_and_without_further_keys(
    copy: Path, form: str | None
):
    content = manifest_content(copy)
    content["graphs"] = dict(reversed(content["graphs"].items()))
    for graph in content["graphs"].values():
        graph |= {"bound": graph.pop("bound")} | ({"form": form} if form else {})
    content |= {"tuning": TUNED} if form else {}
    assert write_manifest(copy, content) == read_manifest(copy)
    assert json.dumps(manifest_content(copy)) == json.dumps(content)


@pytest.mark.parametrize("activations", ["none", "dynamic-int8"])
def test_a_bundle_of_what_left_is_verified_and_not_recomputed(activations: str, copy: Path):
    """Earlier versions wrote these fields into every spec."""
    with (copy / "spec.toml").open("a") as spec:
        spec.write(f'activations = "{activations}"\nkv_dtype = "none"\nkv_scale = "per-tensor"\n')
    write_manifest(copy, manifest_content(copy))
    report = verify(copy, runtimes=["ort-cpu"], recompute=activations == "none")
    assert report.passed
    if activations == "none":
        stored = [verdict for verdict in report.verdicts if verdict.runtime == STORED]
        assert max(verdict.worst or 0 for verdict in stored) < 0.01
        assert len({verdict.case for verdict in stored}) > 30
    else:
        with pytest.raises(SpecError, match=r"activations = 'dynamic-int8' was removed in 0\.3\.0"):
            verify(copy, runtimes=["ort-cpu"], recompute=True)


def test_a_file_beside_the_bundles_own_is_no_damage(copy: Path):
    (copy / "notes.txt").write_text("mine")
    assert verify(copy, runtimes=["ort-cpu"], cases=["base"]).passed


class Exchange(Progress):
    """Replaces a bundle by a broken one, or by nothing, once its runtimes have started."""

    def __init__(self, bundle: Path, other: Path | None) -> None:
        self.bundle, self.other = bundle, other

    def expect(self, steps: int) -> None:  # noqa: ARG002
        if not self.bundle.with_suffix(".old").exists():
            self.bundle.rename(self.bundle.with_suffix(".old"))
            if self.other is not None:
                self.other.rename(self.bundle)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_bundle_that_is_exchanged_while_it_is_verified_is_damage(
    is_replaced: bool, copy: Path, tmp_path: Path
):
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    (other / "model.onnx").write_text("no graph")
    write_manifest(other, manifest_content(other))
    with pytest.raises(BundleError, match="was exchanged while it was read; try again"):
        verify(copy, runtimes=["ort-cpu"], progress=Exchange(copy, other if is_replaced else None))


def test_a_folder_that_is_no_bundle_is_a_bundle_error(tmp_path: Path):
    with pytest.raises(BundleError, match="not a bundle"):
        verify(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        verify(tmp_path / "nothing")


def test_some_cases_are_run_alone_by_their_names(bundle: Path, cli: Cli):
    report = verify(bundle, runtimes=["ort-cpu"], cases=["base"])
    assert report.passed
    assert {v.case for v in report.verdicts} == {"base"}
    done = cli("verify", bundle, "--case", "bsae")
    assert done.returncode == 2
    assert "there is no case 'bsae'; did you mean base?" in done.stderr


def test_a_case_of_one_of_several_bundles_is_run_alone(bundle: Path, tmp_path: Path):
    for name, folder in (("one", bundle), ("two", bundle_of("no-cache"))):
        (tmp_path / name).symlink_to(folder)
    names = [{case.name for case in stored_cases(tmp_path / n / GOLDEN)[1]} for n in ("one", "two")]
    case = min(names[1] - names[0])
    report = verify(tmp_path, runtimes=["ort-cpu"], cases=[case])
    assert report.passed
    assert {v.case for v in report.verdicts} == {case}
    with pytest.raises(UsageError, match="there is no case 'none'"):
        verify(tmp_path, runtimes=["ort-cpu"], cases=[case, "none"])


def test_the_cases_that_failed_last_are_run_alone(bundle: Path, cli: Cli, tmp_path: Path):
    wrong = changed_graph(bundle, tmp_path / "wrong.onnx", wrong_scale)
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    words = ("verify", bundle, "--graph", wrong, "--runtime", "ort-cpu", "--quiet")
    assert cli(*words, "--json", first).returncode == 6
    assert cli(*words, "--json", again, "--last-failed", first).returncode == 6
    verdicts = json.loads(first.read_text())["verdicts"]
    failed = {v["case"] for v in verdicts if v["status"] != "passed"}
    assert failed < {v["case"] for v in verdicts}
    assert {v["case"] for v in json.loads(again.read_text())["verdicts"]} == failed
    first.write_text('{"verdicts": [{"case": "base", "status": "passed"}]}')
    done = cli(*words, "--last-failed", first)
    assert (done.returncode, f"no case failed in {first}" in done.stderr) == (2, True)
    first.write_text("{}")
    assert f"cannot read the report {first}: " in cli(*words, "--last-failed", first).stderr


def test_a_gate_of_the_users_only_tightens(bundle: Path, tmp_path: Path):
    run: Any = {"runtimes": ["ort-cpu"], "cases": ["base"]}
    assert verify(bundle, atol=10.0, **run).passed
    assert verify(bundle, atol=1e-12, **run).exit_code == 6
    wrong = changed_graph(bundle, tmp_path / "wrong.onnx", wrong_scale)
    assert verify(bundle, graph=wrong, atol=10.0, **run).exit_code == 6


def test_the_report_has_the_difference_from_eager_and_from_the_reference(bundle: Path):
    report = verify(bundle, runtimes=["ort-cpu"])
    worst = max(report.verdicts, key=lambda verdict: verdict.worst or 0)
    assert 0 < (worst.worst or 0) < 1
    plain = [verdict for verdict in report.verdicts if verdict.case.startswith("shape_")]
    assert 0 < max(verdict.max_abs or 0 for verdict in plain) < 1e-4
    facts = report.runs[0].facts
    assert facts["threads"]
    assert facts["seconds_limit"]
    assert facts["version"]
    assert "torch" not in sys.modules or report.environment["versions"]
