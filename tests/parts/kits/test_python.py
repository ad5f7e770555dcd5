"""The kit in Python, as a user has it: in a folder of its own, installed, run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest
from evidence import (
    BAD_ENTRIES,
    DECODE_GRAPH,
    NO_SUCH_ROW,
    ONE_ROW,
    UNCOMPARED,
    change_first,
    change_ignored_row,
    check_decode_graph,
    double_decoded,
    lines_of,
    rewritten,
    without_evidence,
)
from readmes import blocks, commands, states_the_meaning_of_true
from shared import bundle_of, swapped_bundle

from attn_export import verify
from attn_export.bundle.golden import read_index
from attn_export.bundle.manifest import read_manifest
from attn_export.errors import BundleError, OutputError, UsageError
from attn_export.parts.kits.kit import GOLDEN, _replay, bundle_spec, write_kit
from attn_export.results import WHOLE_DECODE

NAMES = ("append", "in-place", "no-cache", "float16")


def run(kit: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the kit, with nothing on the path but the kit itself."""
    code = (
        f"import sys; sys.path.insert(0, '.'); from attn_kit.{module} import main; sys.exit(main())"
    )
    command = [sys.executable, "-P", "-W", "error", "-c", code, *words]
    return subprocess.run(command, cwd=kit, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_its_self_test_passes_and_replays_token_by_token(name, tmp_path: Path):
    kit = write_kit("python", bundle_of(name), tmp_path / "kit")
    done = run(kit, "self_test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("token by token" in done.stdout) == (name != "no-cache")
    lines = done.stdout.splitlines()
    assert lines[-1] == f"{name}: {len(lines) - 1}/{len(lines) - 1} passed"
    assert len(lines) > 20


def test_a_layer_whose_decode_is_stored_in_part_replays_another_case():
    bundle = bundle_of("in-place")
    cases = [c for c in read_index(bundle / GOLDEN).cases if c.kind != WHOLE_DECODE]
    name = _replay(bundle_spec(bundle, read_manifest(bundle)), cases)
    (sizes,) = [case.sizes for case in cases if case.name == name]
    assert sizes["past_len"] == 0 < sizes["query_len"]


@pytest.mark.parametrize("name", ["append", "no-cache"])
def test_the_program_in_its_readme_runs(name: str, tmp_path: Path):
    kit = write_kit("python", bundle_of(name), tmp_path / "kit")
    (program,) = blocks(kit, "python")
    command = [sys.executable, "-W", "error", "-c", f"{program}\nprint(*outputs)"]
    done = subprocess.run(command, cwd=kit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "output"
    assert states_the_meaning_of_true(kit) == (name == "append")


def test_the_commands_in_its_readme_are_those_that_the_kit_has(tmp_path: Path):
    kit = write_kit("python", bundle_of("append"), tmp_path / "kit")
    ready, *others = commands(kit)
    assert ready == "python3 -m venv .venv && .venv/bin/pip install ."
    scripts = tomllib.loads((kit / "pyproject.toml").read_text())["project"]["scripts"]
    assert others == [f".venv/bin/{script}" for script in ("attn-kit-test", "attn-kit-decode")]
    assert {"attn-kit-test", "attn-kit-decode"} <= scripts.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [("append", "then 8 tokens"), ("in-place", "then 8 tokens"), ("no-cache", "no KV cache")],
)
def test_it_decodes(name: str, says: str, tmp_path: Path):
    kit = write_kit("python", bundle_of(name), tmp_path / "kit")
    done = run(kit, "decode", "--tokens", "8")
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_single_tokens_run_the_graph_for_them(tmp_path: Path):
    kit = write_kit("python", bundle_of("in-place"), tmp_path / "kit")
    assert DECODE_GRAPH in run(kit, "decode", "--tokens", "2").stdout
    double_decoded(kit / "bundle")
    check_decode_graph(run(kit, "self_test").stdout.splitlines())


def test_a_wrong_scale_fails_the_self_test_by_name(tmp_path: Path):
    kit = write_kit("python", bundle_of("append"), tmp_path / "kit", dialect="standard")
    graph = kit / "bundle" / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    kept = [a for a in node.attribute if a.name != "scale"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("scale", 1.0)])
    onnx.save(model, graph)
    done = run(kit, "self_test")
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "relative error" in done.stdout


def test_a_row_that_is_ignored_is_not_compared(tmp_path: Path):
    kit = write_kit("python", bundle_of("append"), tmp_path / "kit")
    change_ignored_row(kit / "bundle")
    done = run(kit, "self_test")
    assert (done.returncode, lines_of(done.stdout)[ONE_ROW][:4]) == (0, "ok  ")


def test_what_is_not_compared_does_not_pass_as_in_verify(tmp_path: Path):
    bundle = without_evidence(bundle_of("append"), tmp_path / "bundle")
    kit = write_kit("python", bundle, tmp_path / "kit", dialect="standard")
    assert tomllib.loads((kit / "pyproject.toml").read_text())["project"]["name"] == "attn-kit"
    done = run(kit, "self_test")
    assert done.returncode == 1, done.stderr
    report = verify(bundle, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    verdicts = {v.case: v for v in report.verdicts if v.output == "output"}
    lines, count = lines_of(done.stdout), len(done.stdout.splitlines()) - 1
    assert f": {count - len(UNCOMPARED)}/{count} passed" in done.stdout.splitlines()[-1]
    words = {"passed": "ok  ", "failed": "FAIL", "unusable": "not-compared"}
    for case, line in lines.items():
        assert case not in verdicts or line.startswith(f"{words[verdicts[case].status]} {case}  ")
    for case, (_, status, says) in UNCOMPARED.items():
        assert verdicts[case].status == status
        assert says in lines[case]


@pytest.mark.parametrize("what", [*BAD_ENTRIES, "a row that is not there"])
@pytest.mark.every(4)
def test_an_index_that_does_not_say_how_to_judge_is_exit_code_2(what: str, tmp_path: Path):
    kit = write_kit("python", bundle_of("append"), tmp_path / "kit")
    change_first(kit / "bundle", BAD_ENTRIES.get(what, NO_SUCH_ROW))
    done = run(kit, "self_test")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("what", BAD_ENTRIES)
@pytest.mark.every(4)
def test_no_kit_is_written_of_an_index_that_does_not_say_how_to_judge(what: str, tmp_path: Path):
    change = BAD_ENTRIES[what]
    bundle = rewritten(
        bundle_of("append"), tmp_path / "bundle", lambda index: change(index["cases"][0])
    )
    with pytest.raises(BundleError, match=r"index\.json was changed"):
        write_kit("c", bundle, tmp_path / "kit")
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ({"inputs": {"query": {"dtype": "void", "shape": [1]}}}, r"'void' - at `\$\.inputs"),
        (
            {"outputs": {"output": {"dtype": "float32", "shape": [["1}; int x = {1"]]}}},
            r"got `array` - at `\$\.outputs",
        ),
        ({"graphs": {"../model.onnx": {}}}, r"such characters - at .*\$\.graphs"),
        ({"graphs": {"/model.onnx": {}}}, r"such characters - at .*\$\.graphs"),
    ],
)
def test_no_kit_is_written_of_a_manifest_that_names_what_cannot_be(
    manifest: dict[str, object], says: str, tmp_path: Path
):
    with pytest.raises(BundleError, match=says):
        write_kit("c", rewritten(bundle_of("append"), tmp_path / "b", **manifest), tmp_path / "kit")


@pytest.mark.parametrize("file", ["golden/test_data_set_0/input_0.pb", "model.ort.onnx"])
def test_a_damaged_file_is_one_line_and_exit_code_2(file: str, tmp_path: Path):
    kit = write_kit("python", bundle_of("append"), tmp_path / "kit")
    path = kit / "bundle" / file
    path.write_bytes(path.read_bytes()[:40])
    done = run(kit, "self_test")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_graphs_are_the_fastest_also_where_the_cache_has_another_order(tmp_path: Path):
    settings = "attn_kit/settings.py"
    of_append = (write_kit("python", bundle_of("append"), tmp_path / "a") / settings).read_text()
    assert "GRAPH = 'model.ort.onnx'" in of_append
    assert "DECODE = 'model.ort.decode.onnx'" in of_append
    kit = write_kit("python", swapped_bundle(), tmp_path / "c")  # ort holds values transposed
    assert "LAYOUTS = {'past_value': [0, 1, 3, 2]" in (kit / settings).read_text()
    done = run(kit, "self_test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(kit, "decode", "--tokens", "4").returncode == 0


def test_an_unwritable_kit_is_refused_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(UsageError, match="unknown language 'fortran'; choose from c, cpp"):
        write_kit("fortran", bundle_of("append"), tmp_path / "kit")
    with pytest.raises(UsageError, match="runs portable, not ort"):
        write_kit("web", bundle_of("append"), tmp_path / "kit", dialect="ort")
    with pytest.raises(UsageError, match="not a bundle"):
        write_kit("python", tmp_path / "nothing", tmp_path / "kit")
    assert not list(tmp_path.iterdir())
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "mine").write_text("mine")
    with pytest.raises(OutputError, match="is no kit"):
        write_kit("python", bundle_of("append"), tmp_path / "kit")
    assert [p.name for p in tmp_path.rglob("*")] == ["kit", "mine"]


def test_bfloat16_is_refused_where_the_engines_interface_has_none(tmp_path: Path):
    with pytest.raises(UsageError, match="query is bfloat16, which the python kit cannot hold"):
        write_kit("python", bundle_of("bfloat16"), tmp_path / "kit")


@pytest.mark.parametrize("through_link", [False, True])
def test_a_kit_as_it_was_written_is_replaced(through_link: bool, tmp_path: Path):
    (tmp_path / "link").symlink_to("kit")
    for language in ("python", "c"):
        write_kit(language, bundle_of("append"), tmp_path / ("link" if through_link else "kit"))
    assert (tmp_path / "kit" / "CMakeLists.txt").is_file()
    assert not (tmp_path / "kit" / "pyproject.toml").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kit", "link"]
