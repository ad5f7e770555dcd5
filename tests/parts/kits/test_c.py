"""The kit in C, as a user has it: built in a folder of its own, run from another."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence import (
    ONE_ROW,
    REASON,
    UNCOMPARED,
    change_ignored_row,
    check_decode_graph,
    double_decoded,
    lines_of,
)
from native_kits import (
    DAMAGED,
    changed,
    compile_and_run,
    judged,
    kit_of,
    kit_without_evidence,
    run,
    scale,
    transposed,
)
from readmes import blocks, commands, states_the_meaning_of_true
from shared import BUNDLES, bundle_of, extended

from attn_export.bundle.golden import read_index
from attn_export.parts.kits.kit import LANGUAGES

KITS = [name for name in BUNDLES if name != "append"]


@pytest.fixture(autouse=True)
def _here(need) -> None:
    need("c")


@pytest.fixture
def bundle() -> Path:
    """Return a bundle with an appended cache."""
    return bundle_of("append")


@pytest.fixture
def kit() -> Path:
    """Return a kit of that bundle; its programs take another folder of it as an argument."""
    return kit_of("append")


def test_its_self_test_passes_every_case_and_the_decode(kit: Path, bundle: Path):
    done = run(kit, "self_test")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = judged(done)
    whole = [entry for entry in read_index(bundle / "golden").cases if not entry.shapes]
    assert len(lines) == len(whole) + 1
    assert all(line.startswith("ok   ") and "of tolerance" in line for line in lines)
    assert " token by token  " in lines[-1]
    assert f"append: {len(lines)} of {len(lines)} passed" in done.stdout


def test_its_readme_has_the_commands_that_build_and_test_it(kit: Path):
    assert commands(kit) == list(LANGUAGES["c"].test)
    assert states_the_meaning_of_true(kit)


@pytest.mark.parametrize("name", extended(["append", "in-place"], "append".__eq__))
def test_the_program_in_its_readme_runs(name: str, tmp_path: Path):
    kit = kit_of(name)
    (program,) = blocks(kit, "c")
    done = compile_and_run(kit, program, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", extended(KITS, {"no-cache", "bfloat16"}.__contains__))
@pytest.mark.every(3)
def test_other_caches_and_types_pass_too(name: str):
    other = kit_of(name)
    done = run(other, "self_test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("token by token" in done.stdout) == (name != "no-cache")
    decoded = run(other, "decode", "5")
    assert decoded.returncode == 0, decoded.stderr
    says = {"in-place": "written in place", "no-cache": "has no KV cache"}
    assert says.get(name, "5 tokens: ") in decoded.stdout


@pytest.mark.every(2)
def test_single_tokens_run_the_graph_for_them(tmp_path: Path):
    kit = kit_of("in-place")
    done = run(kit, "self_test", changed(bundle_of("in-place"), tmp_path, double_decoded))
    check_decode_graph(judged(done))


@pytest.mark.every(2)
def test_it_decodes(kit: Path):
    done = run(kit, "decode", "5")
    assert done.returncode == 0, done.stderr
    assert "prompt of 8 tokens" in done.stdout
    assert "ms per token, cache fed back" in done.stdout
    assert run(kit, "decode", "none").returncode == 2


def test_a_wrong_scale_is_seen(kit: Path, bundle: Path, tmp_path: Path):
    done = run(kit, "self_test", changed(bundle, tmp_path, scale))
    assert done.returncode == 1
    assert "output: relative error" in done.stdout
    assert " token by token  output: relative error" in done.stdout


def test_an_output_of_another_shape_than_the_reference_fails(
    kit: Path, bundle: Path, tmp_path: Path
):
    done = run(kit, "self_test", changed(bundle, tmp_path, transposed))
    assert done.returncode == 1
    first, *_ = judged(done)
    assert first.startswith("FAIL ")
    assert "  output: its shape is [" in first


def test_a_row_that_is_ignored_is_not_compared(kit: Path, bundle: Path, tmp_path: Path):
    done = run(kit, "self_test", changed(bundle, tmp_path, change_ignored_row))
    assert (done.returncode, lines_of(done.stdout)[ONE_ROW][:4]) == (0, "ok  ")


@pytest.mark.every(3)
def test_what_is_not_compared_does_not_pass_and_has_a_reason():
    kit = kit_without_evidence()
    done = run(kit, "self_test")
    assert done.returncode == 1, done.stderr
    lines = lines_of(done.stdout)
    words = {"failed": "FAIL", "unusable": "not-compared"}
    for name, (_, status, says) in UNCOMPARED.items():
        assert lines[name].startswith(f"{words[status]} {name}  output: "), lines[name]
        assert says in lines[name]
    first, *_ = judged(done)
    assert first.endswith(" there is no row 1000000000 to ignore")
    count = len(judged(done))
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith(f"of {REASON}: {count - len(UNCOMPARED) - 1} of {count} passed")


@pytest.mark.parametrize("says", DAMAGED)
@pytest.mark.every(2)
def test_a_damaged_bundle_is_one_line_and_exit_code_2(
    says: str, kit: Path, bundle: Path, tmp_path: Path
):
    done = run(kit, "self_test", changed(bundle, tmp_path, DAMAGED[says]))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
