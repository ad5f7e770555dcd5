"""The kit in JavaScript for Node.js, as a user has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

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
    without_evidence,
)
from javascript_kits import kit_of, plant_fault, run
from readmes import blocks, commands, states_the_meaning_of_true
from shared import bundle_of, extended, spec_of

from attn_export.bundle.manifest import FORMAT
from attn_export.parts.kits.kit import write_kit

Need = Callable[[str], None]
NAMES = ("append", "in-place", "no-cache", "float16")


@pytest.fixture(autouse=True)
def _node(need: Need) -> None:
    need("node")


def test_it_is_set_up_tested_and_decodes_as_its_readme_says(tmp_path: Path):
    kit = write_kit("node", bundle_of("append"), tmp_path / "kit")
    ready, test, decode = commands(kit)
    for command in (ready, f"{test} --silent"):
        done = run(kit, *command.split())
        assert done.returncode == 0, done.stdout + done.stderr
    decoded = run(kit, *decode.split(), "--silent")
    assert re.search(r"64 tokens of \d+\.\d+ ms each; 72 in the cache", decoded.stdout)


@pytest.mark.parametrize("name", ["append", "no-cache"])
def test_the_programs_in_its_readme_run(name: str, tmp_path: Path):
    kit = kit_of("node", bundle_of(name), tmp_path, "node")
    programs = blocks(kit, "js")
    assert len(programs) == 1 + (name != "no-cache")
    has_step = "console.log(step.output.dims.length);" if name != "no-cache" else ""
    show = f"console.log(Object.keys(outputs).join(' ')); {has_step}"
    (kit / "mine.mjs").write_text("\n".join([*programs, show]))
    done = run(kit, "node", "mine.mjs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("output")
    assert states_the_meaning_of_true(kit) == (name == "append")


# "append" is tested as its README says, and "in-place" as another bundle.
@pytest.mark.parametrize("name", extended(NAMES, "float16".__eq__))
def test_every_case_passes_and_the_replay_with_them(name: str, tmp_path: Path):
    done = run(kit_of("node", bundle_of(name), tmp_path, "node"), "node", "src/self_test.mjs")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = done.stdout.splitlines()
    assert all(re.fullmatch(r"ok   .+  \d+\.\d{3} of tolerance", line) for line in lines), lines
    assert len(lines) > 20
    assert f"all {len(lines)} passed" in summary
    assert ("replay of" in done.stdout) == (name != "no-cache")


def test_single_tokens_run_the_graph_for_them(tmp_path: Path):
    kit = kit_of("node", bundle_of("in-place"), tmp_path, "node")
    assert DECODE_GRAPH in run(kit, "node", "src/decode.mjs", "2").stdout
    double_decoded(kit / "bundle")
    check_decode_graph(run(kit, "node", "src/self_test.mjs").stdout.splitlines())


@pytest.mark.parametrize("dialect", extended(["standard", "portable"], "standard".__eq__))
def test_a_wrong_scale_fails(dialect: str, tmp_path: Path):
    kit = _ready(write_kit("node", bundle_of("append"), tmp_path / "kit", dialect=dialect))
    plant_fault(kit / "bundle", spec_of("append"))
    done = run(kit, "node", "src/self_test.mjs")
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert any(re.search(r"output: relative error \S+ over .+, tolerance", line) for line in failed)
    assert f"{len(failed)} of " in done.stdout.splitlines()[-1]


def _ready(kit: Path) -> Path:
    from attn_export.parts.installing import home

    (kit / "node_modules").symlink_to(home() / "node" / "node_modules")
    return kit


def test_a_row_that_is_ignored_is_not_compared(tmp_path: Path):
    kit = kit_of("node", bundle_of("append"), tmp_path, "node")
    change_ignored_row(kit / "bundle")
    done = run(kit, "node", "src/self_test.mjs")
    assert (done.returncode, lines_of(done.stdout)[ONE_ROW][:4]) == (0, "ok  ")


def test_what_is_not_compared_does_not_pass_and_has_a_reason(tmp_path: Path):
    bundle = without_evidence(bundle_of("append"), tmp_path / "bundle")
    done = run(kit_of("node", bundle, tmp_path, "node"), "node", "src/self_test.mjs")
    assert done.returncode == 1, done.stderr
    lines = lines_of(done.stdout)
    words = {"failed": "FAIL", "unusable": "not-compared"}
    for name, (_, status, says) in UNCOMPARED.items():
        assert lines[name].startswith(f"{words[status]} {name}  output: "), lines[name]
        assert says.replace("1e+09", "1000000000").replace("inf", "Infinity") in lines[name]
    assert f"{len(UNCOMPARED)} of " in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("what", [*BAD_ENTRIES, "a row that is not there"])
@pytest.mark.every(3)
def test_an_index_that_does_not_say_how_to_judge_is_exit_code_2(what: str, tmp_path: Path):
    kit = kit_of("node", bundle_of("append"), tmp_path, "node")
    change_first(kit / "bundle", BAD_ENTRIES.get(what, NO_SUCH_ROW))
    done = run(kit, "node", "src/self_test.mjs")
    assert (done.returncode, done.stdout) == (2, "")
    assert "golden/index.json does not say how" in done.stderr or "ignores rows" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_bundle_of_another_format_is_refused(tmp_path: Path):
    kit = kit_of("node", bundle_of("append"), tmp_path, "node")
    manifest = kit / "bundle" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(FORMAT, "attn-export-bundle/3"))
    done = run(kit, "node", "src/self_test.mjs")
    assert (done.returncode, done.stderr) == (
        2, f"manifest.json is not of the format {FORMAT}; build the bundle again\n",
    )  # fmt: skip


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("golden/test_data_set_0/input_0.pb", "golden/test_data_set_0/input_0.pb is damaged"),
        ("golden/index.json", "golden/index.json is damaged"),
        ("model.ort.onnx", "refuses model.ort.onnx"),
    ],
)
def test_an_unreadable_bundle_is_one_line_and_exit_code_2(file: str, says: str, tmp_path: Path):
    kit = kit_of("node", bundle_of("append"), tmp_path, "node")
    cut(kit / "bundle" / file)
    done = run(kit, "node", "src/self_test.mjs")
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    (kit / "bundle" / file).unlink()
    done = run(kit, "node", "src/self_test.mjs")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_it_tests_another_bundle_that_is_named(tmp_path: Path):
    kit = kit_of("node", bundle_of("append"), tmp_path, "node")
    done = run(kit, "node", "src/self_test.mjs", str(bundle_of("in-place")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("in-place: all")


def test_without_a_cache_decode_says_so(tmp_path: Path):
    done = run(kit_of("node", bundle_of("no-cache"), tmp_path, "node"), "node", "src/decode.mjs")
    assert (done.returncode, done.stdout) == (
        0, "no-cache has no cache: there is nothing to decode with\n",
    )  # fmt: skip
