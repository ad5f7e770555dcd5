"""`attn-export tune`: it measures forms, keeps the fastest ones, and verifies the bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import shared
from conftest import Cli, small_spec
from onnx import numpy_helper

from attn_export import build, verify
from attn_export.bundle.manifest import (
    EVIDENCE,
    MANIFEST,
    PAGE,
    SIGNATURE,
    manifest_content,
    read_manifest,
    write_manifest,
)
from attn_export.errors import BundleError, RuntimeFailure, UsageError
from attn_export.parts.benchmarks import tune as job
from attn_export.parts.benchmarks.bench_terminal import print_tuned
from attn_export.parts.benchmarks.measurements import (
    Candidate,
    Measured,
    Work,
    WorkloadResult,
)
from attn_export.parts.benchmarks.ort_forms import WHOLE_ROWS
from attn_export.parts.benchmarks.tune import TuningResult, tune

PREFILL, DECODE = "model.ort.onnx", "model.ort.decode.onnx"
BLOCKS, KERNEL_BLOCKS = "blocks of 64 queries", "kernels in blocks of 64 queries"


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a bundle with a cache in place, which may be changed."""
    return Path(shutil.copytree(shared.bundle_of("in-place"), tmp_path / "copy"))


def choose(monkeypatch: pytest.MonkeyPatch, **forms: str) -> None:
    """Let these forms be the fastest: times of graphs this small are chance."""
    chosen = {PREFILL: "kernels", DECODE: "kernels", **forms}
    monkeypatch.setattr(job, "_fastest", lambda name, _: chosen[name])


def quickly(folder: Path) -> TuningResult:
    return tune(folder, prefill=[5], decode=[9], rounds=1, threads=1, turn_seconds=0.001)


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


@pytest.mark.parametrize("blocks", [BLOCKS, KERNEL_BLOCKS])
@pytest.mark.every(2)
def test_the_chosen_forms_are_in_the_bundle_which_passes(
    copy: Path, monkeypatch, capsys, blocks: str
):
    (copy / EVIDENCE).mkdir()
    (copy / EVIDENCE / "one.json").write_text("of the graphs as they were")
    write_manifest(copy, manifest_content(copy))
    (copy / SIGNATURE).write_text("of these, too")
    choose(monkeypatch, **{PREFILL: blocks, DECODE: "products"})
    before = json.loads((copy / "report.json").read_text())
    tuned = quickly(copy)
    assert tuned.exit_code == 0
    print_tuned(tuned, quiet=False)
    assert f"{SIGNATURE} was of the old graphs and is gone" in capsys.readouterr().out
    assert tuned.forms == {PREFILL: blocks, DECODE: "products"}
    assert ("Loop" if blocks == BLOCKS else "Scan") in operators(copy / PREFILL)
    assert "GroupQueryAttention" not in operators(copy / DECODE)

    manifest = read_manifest(copy)
    assert manifest.graphs[PREFILL].form == blocks
    needed = "1.28" if blocks == BLOCKS else "1.31"
    assert manifest.graphs[PREFILL].needs.onnxruntime == needed
    assert manifest.graphs[DECODE].needs.onnxruntime == "1.28"
    assert manifest.tuning is not None
    times = manifest.tuning.milliseconds
    assert set(times) == {f"{PREFILL}: prefill, B 1, L 5", f"{DECODE}: decode, B 1, S 9"}
    assert set(times[f"{PREFILL}: prefill, B 1, L 5"]) == {
        "kernels", *(f"blocks of {size} queries" for size in (64, 128, 256, 512)),
        *(f"kernels in blocks of {size} queries" for size in (64, 128, 256)),
    }  # fmt: skip
    assert set(times[f"{DECODE}: decode, B 1, S 9"]) == {"kernels", "products"}
    assert all(ms > 0 for of_forms in times.values() for ms in of_forms.values())

    assert tuned.left_out == (SIGNATURE, EVIDENCE)
    assert not any((copy / name).exists() for name in tuned.left_out)
    assert not [name for name in manifest.files if EVIDENCE in name]
    report = json.loads((copy / "report.json").read_text())
    assert set(before["notes"]) <= set(report["notes"])
    assert f"{PREFILL} is tuned for" in report["notes"][-2]
    assert "is tuned for" in (copy / PAGE).read_text()
    again = verify(copy, runtimes=["ort-cpu"])
    assert again.passed
    assert {verdict.graph for verdict in again.verdicts} >= {PREFILL, DECODE, "model.onnx"}


@pytest.mark.extended
def test_a_tuned_bundle_can_be_tuned_back(copy: Path, monkeypatch):
    untouched = {name: (copy / name).read_bytes() for name in (PREFILL, DECODE)}
    choose(monkeypatch, **{PREFILL: BLOCKS})
    assert quickly(copy).exit_code == 0
    choose(monkeypatch)
    assert quickly(copy).forms == {PREFILL: "kernels", DECODE: "kernels"}
    back = {name: onnx.load(copy / name, load_external_data=False) for name in untouched}
    for name, content in untouched.items():
        assert [n.op_type for n in back[name].graph.node] == [
            n.op_type for n in onnx.load_from_string(content).graph.node
        ]
    assert verify(copy, runtimes=["ort-cpu"]).passed


def test_nothing_is_written_where_the_bundle_has_the_fastest_forms(copy: Path, monkeypatch):
    choose(monkeypatch)
    before = (copy / MANIFEST).stat().st_ino
    assert quickly(copy).report is None
    assert (copy / MANIFEST).stat().st_ino == before


def wrong(bundle: Path) -> Path:
    """Return a bundle after its golden vectors were changed to such as no graph gives."""
    index = bundle / "golden" / "index.json"
    content = json.loads(index.read_text())
    for case in content["cases"]:
        for allowed in case["allowed"].values():
            allowed["whole"] = allowed["row"] = 1e-12
    index.write_text(json.dumps(content, indent=1) + "\n")
    write_manifest(bundle, manifest_content(bundle))
    return bundle


def unlabelled(bundle: Path) -> Path:
    """Return a bundle whose golden vectors are refused after its new graphs are written."""
    index = bundle / "golden" / "index.json"
    content = json.loads(index.read_text())
    content["cases"] = content["cases"][:1]
    index.write_text(json.dumps(content, indent=1) + "\n")
    write_manifest(bundle, manifest_content(bundle))
    return bundle


def files(bundle: Path) -> dict[str, bytes]:
    return {
        path.relative_to(bundle).as_posix(): path.read_bytes()
        for path in bundle.rglob("*")
        if path.is_file()
    }


def test_a_bundle_that_does_not_pass_stays_as_it_was(copy: Path, monkeypatch, capsys):
    """Golden vectors that no graph gives stand in for a form that computes something else."""
    choose(monkeypatch, **{PREFILL: BLOCKS})
    (wrong(copy) / SIGNATURE).write_text("of the graphs as they are")
    before = files(copy)
    tuned = quickly(copy)
    assert tuned.exit_code == 6
    assert files(copy) == before
    assert "Loop" not in operators(copy / PREFILL)
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]
    print_tuned(tuned, quiet=False)
    said = capsys.readouterr().out
    assert "the bundle stays as it was" in said
    assert "in-place: failed: ort-cpu gives wrong outputs (exit 6)" in said
    assert "old graphs" not in said
    assert "Verdict(" not in said


def test_a_bundle_stays_as_it_was_where_judging_ends_in_an_error(copy: Path, monkeypatch):
    choose(monkeypatch, **{PREFILL: BLOCKS})
    before = files(unlabelled(copy))
    with pytest.raises(BundleError, match="are no evidence"):
        quickly(copy)
    assert files(copy) == before
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_a_bundle_that_was_built_again_meanwhile_stays(copy: Path, monkeypatch):
    def fastest(name: str, _: object) -> str:
        write_manifest(copy, {**manifest_content(copy), "name": "another"})
        return BLOCKS if name == PREFILL else "kernels"

    monkeypatch.setattr(job, "_fastest", fastest)
    with pytest.raises(BundleError, match="was exchanged while it was read"):
        quickly(copy)
    assert read_manifest(copy).name == "another"
    assert "Loop" not in operators(copy / PREFILL)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.every(2)
def test_whole_rows_of_scores_give_the_same(kv_dtype: str, tmp_path: Path, monkeypatch):
    spec = small_spec(cache="in-place", kv_dtype=kv_dtype, attn_mask="none", rotary="half")
    folder, options = tmp_path / "b", {"dialects": ["standard", "ort"], "runtimes": ["ort-cpu"]}
    assert build(spec, folder, **options).passed
    choose(monkeypatch, **{DECODE: WHOLE_ROWS.name})
    assert quickly(folder).exit_code == 0
    graph = onnx.load(folder / DECODE).graph
    (kernel,) = (node for node in graph.node if node.op_type == "GroupQueryAttention")
    (sink,) = (t for t in graph.initializer if t.name == kernel.input[11])
    assert list(numpy_helper.to_array(sink)) == [np.float32(-1e30)] * spec.num_heads
    assert kernel.input[10] == ""  # no bias beside it


def result(name: str, **seconds: tuple[float, ...]) -> WorkloadResult:
    found = [
        Measured(Candidate(form, "ours", "graph", {}, Work()), times, reason="refused")
        for form, times in seconds.items()
    ]
    return WorkloadResult(f"{PREFILL}: {name}", {}, tuple(found))


@pytest.mark.parametrize(
    ("workloads", "fastest"),
    [
        ([result("a", kernels=(2.0,), blocks=(1.0,))], "blocks"),
        ([result("a", kernels=(1.0,), blocks=(2.0,))], "kernels"),
        ([result("a", kernels=(1.0,), blocks=(0.98,))], "kernels"),
        ([result("a", kernels=(1.0,), blocks=(0.9,)), result("b", kernels=(1.0,), blocks=(1.5,))],
         "kernels"),
        ([result("a", kernels=(1.0,), blocks=(0.5,)), result("b", kernels=(1.0,), blocks=(1.5,))],
         "blocks"),
        ([result("a", kernels=(1.0,), blocks=())], "kernels"),
        ([result("a", kernels=(), blocks=(9.0,))], "blocks"),
        ([result("a", kernels=(1.0,), blocks=(0.1,)), result("b", kernels=(1.0,), blocks=())],
         "kernels"),
        ([], ""),
    ],
)  # fmt: skip
def test_the_form_with_the_least_times_over_all_sizes_is_chosen(workloads, fastest: str):
    assert job._fastest(PREFILL, workloads) == fastest


def test_no_form_that_runs_is_an_error_with_the_reason():
    with pytest.raises(RuntimeFailure, match=rf"{PREFILL}: no form of it ran: refused"):
        job._fastest(PREFILL, [result("a", kernels=(), blocks=())])


def test_graphs_without_other_forms_are_not_changed(tmp_path: Path):
    """Tune graphs with scores as an output, which are of all queries at once."""
    folder = shutil.copytree(shared.bundle_of("no-cache"), tmp_path / "copy")
    tuned = tune(folder, prefill=[5], rounds=1, threads=1, turn_seconds=0.001)
    assert tuned.forms == {PREFILL: "kernels"}
    assert tuned.report is None


def test_a_bundle_without_graphs_to_tune_is_refused(tmp_path: Path):
    spec = shared.spec_of("in-place")
    build(spec, tmp_path / "b", dialects=["standard"], runtimes=["ort-cpu"])
    with pytest.raises(UsageError, match=r"no graph in the ort dialect beside model\.onnx"):
        tune(tmp_path / "b")


def test_an_unknown_runtime_is_refused_before_anything_is_measured(tmp_path: Path):
    with pytest.raises(UsageError, match="unknown runtime 'nope'"):
        tune(tmp_path / "there is no bundle", runtimes=["nope"])


def test_decoding_without_a_cache_is_refused(tmp_path: Path):
    folder = shutil.copytree(shared.bundle_of("no-cache"), tmp_path / "copy")
    with pytest.raises(UsageError, match="--decode: the graphs have no cache"):
        tune(folder, decode=[9])


def test_the_command_prints_forms_and_writes_json(copy: Path, cli: Cli, tmp_path: Path):
    done = cli(
        "tune", copy, "--prefill", "5", "--rounds", "1", "--threads", "1",
        "--json", tmp_path / "tuned.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "tuned.json").read_text())
    assert content["format"] == "attn-export-tune/1"
    assert set(content["forms"]) == {PREFILL, DECODE}
    assert f"{PREFILL}: {content['forms'][PREFILL]}\n" in done.stdout
    assert verify(copy, runtimes=["ort-cpu"]).passed


@pytest.mark.extended
def test_tune_after_a_build_leaves_other_graphs(cli: Cli, tmp_path: Path):
    layer = ("--embed-dim", 16, "--num-heads", 2, "--causal")
    place = ("--output", tmp_path / "b", "--runtime", "ort-cpu")
    for arguments in (("build", *layer, *place), ("tune", tmp_path / "b")):
        done = cli(*arguments)
        assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "b", runtimes=["ort-cpu"]).passed
    assert "form" not in manifest_content(tmp_path / "b")["graphs"]["model.onnx"]
