"""Tests of the command line: exit codes, errors of one line, no files left after errors."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from conftest import Cli, command
from processes import default_signals, wait_until_handled

from attn_export.commands.build_input import GROUPS
from attn_export.commands.main import cli as group
from attn_export.commands.main import run

SMALL = ("--variant", "gqa", "--embed-dim", "32", "--num-heads", "4", "--runtime", "ort-cpu")

WRONG_USE = [
    (("build",), 2, "nothing to build"),
    (("explain", "--runtime", "ort-cpu"), 2, "explain takes a BUNDLE, or --module"),
    (("explain", "b", "--module", "m.py:f", "--graph", "g.onnx", "--runtime", "ort-cpu"), 2,
     "explain takes a BUNDLE, or --module"),
    *(
        ((*words, option, f"x={first}", option, f"x={second}"), 2, f"{option} gives x twice")
        for words, option, first, second in (
            (("build",), "--set", "1", "2"), (("explain", "b"), "--option", "1", "2"),
            (("explain", "b"), "--fix-input", "1", "1"),
            (("compare", "a.onnx", "b.onnx"), "--name", "a", "b"),
            (("compare", "a.onnx", "b.onnx"), "--range", "1:2", "1:3"),
            (("compare", "a.onnx", "b.onnx"), "--relation", "a", "b"),
        )
    ),
    (("build", "--variant", "mqq"), 2, "unknown variant 'mqq'; did you mean mqa?"),
    (("check", "."), 2, ". is a folder; give an ONNX file in it"),
    (("embed", "BUNDLE", "nothing.txt"), 2, "cannot read nothing.txt: No such file"),
    (("build", "--variant", "gqa", "--num-kv-heads", "3"), 2,
     "num_heads 8 does not divide by num_kv_heads 3; choose one of 1, 2, 4, 8"),
    (("build", "--embed-dim", "10", "--num-heads", "4"), 2,
     "embed_dim 10 does not divide by num_heads 4"),
    (("build", "--embed-dim", "64", "--num-heads", "4", "--cross", "--causal"), 2,
     "causal = true with cross = true"),
    (("build", "--variant", "mqa", "--attn-mask", "bool[S,L]"), 2, "'bool[S,L]'"),
    (("build", "--variant", "mqa", "--runtime", "ort_cpu"), 2, "unknown runtime 'ort_cpu'"),
    (("build", "--variant", "mqa", "--require", "trt"), 2, "unknown runtime 'trt'"),
    (("build", "--variant", "mqa", "--dialect", "fancy"), 2, "unknown dialect 'fancy'"),
    (("build", "--variant", "mqa", "--num-heads", "four"), 2, "'four'"),
    (("build", "--variant", "mqa", "--atol", "-1"), 2, "-1"),
    (("build", "--variant", "mqa", "--output", "/dev/null/x"), 2, "cannot write /dev/null/x"),
    (("build", "no.toml"), 2, "cannot read the spec no.toml"),
    (("build", "typo.toml"), 2, "unknown key 'num_head'"),
    (("build", "broken.toml"), 2, "is not TOML"),
    (("build", "typo.toml", "--variant", "mqa"), 2, "choose one"),
    (("build", "--variant", "mqa", "--dry-run"), 2,
     "leave out --dry-run; after the build, run attn-export dry-run BUNDLE"),
    (("build", "--no-dry-run", "--variant", "mqa"), 2, "leave out --no-dry-run; after"),
    (("verify",), 2, "BUNDLE"),
    (("verify", "nowhere"), 2, "not a bundle"),
    (("verify", __file__), 2, "is a file; give the folder of the bundle"),
    (("check", "nowhere.onnx"), 2, "cannot read nowhere.onnx"),
    (("verify", "nowhere", "--graph", "g.onnx", "--case", "base"), 2, "there is no such folder"),
    (("biuld",), 2, "unknown command 'biuld'; did you mean build?"),
    (("build", "--dtype", "flaot16"), 2, "did you mean float16?"),
    (("check", "garbage.onnx"), 4, "not an ONNX model"),
    (("check", "truncated.onnx"), 4, "not an ONNX model"),
    (("frobnicate",), 2, "frobnicate"),
    (("build", "--frobnicate"), 2, "--frobnicate"),
    (("build", "--variant", "mqa", "--evidence"), 2, "--evidence was removed in 0.3.0"),
    (("evidence", "models/mqa"), 2, "evidence was removed in 0.3.0; report.json has what"),
    (("build", "--variant", "mqa", "--tune"), 2, "--tune was removed in 0.3.0"),
    (("site", "heads.sweep", "-o", "x"), 2, "site was removed in 0.3.0; sweep --json writes"),
    (("tune", "models/mqa", "--rounds", "1"), 2, "tune was removed in 0.3.0; build writes"),
]  # fmt: skip


@pytest.fixture
def workplace(tmp_path: Path, bundle: Path) -> Path:
    """Return a folder with invalid files, each of which has one fault."""
    (tmp_path / "typo.toml").write_text("embed_dim = 32\nnum_heads = 4\nnum_head = 4\n")
    (tmp_path / "broken.toml").write_text("embed_dim = = 32\n")
    (tmp_path / "garbage.onnx").write_bytes(b"this is no protobuf message \xff\xff")
    whole = (bundle / "model.onnx").read_bytes()
    (tmp_path / "truncated.onnx").write_bytes(whole[: len(whole) * 2 // 3])
    return tmp_path


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG_USE, ids=lambda x: str(x)[:60])
def test_wrong_use_is_one_line_and_a_code_and_nothing_is_written(
    arguments, code: int, message: str, workplace: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(workplace)
    before = sorted(workplace.rglob("*"))
    assert run(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("attn-export: ")
    assert message in said.err
    assert sorted(workplace.rglob("*")) == before


def test_the_main_job_prints_a_plain_table_and_where_the_bundle_is(cli: Cli, tmp_path: Path):
    done = cli("build", *SMALL, "--dialect", "standard")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert all(len(line) <= 80 for line in lines)
    assert "gqa: passed" in done.stdout
    assert "bundle: models/gqa" in done.stdout
    assert (tmp_path / "models" / "gqa" / "manifest.json").is_file()


def test_json_on_stdout_is_all_that_is_there(cli: Cli, bundle: Path):
    done = cli("verify", bundle, "--json", "-")
    assert done.stderr == ""  # a pipe gets no progress bar
    report = json.loads(done.stdout)
    assert report["format"] == "attn-export-report/1"
    assert report["passed"] is True
    assert report["exit_code"] == done.returncode == 0
    assert {run["runtime"] for run in report["runs"]} == {"ort-cpu"}  # there is no GPU
    assert {"whole", "row", "worst", "max_abs", "max_rel"} <= report["verdicts"][0].keys()


def test_json_to_a_file_and_quiet(cli: Cli, bundle: Path, tmp_path: Path):
    done = cli("verify", bundle, "--quiet", "--json", tmp_path / "r.json")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert json.loads((tmp_path / "r.json").read_text())["passed"]
    assert cli("verify", bundle, "--json", tmp_path / "no" / "r.json").returncode == 2


TRAINING = """
import torch
from attn_export import Subject

def subject():
    axes = {"x": {0: "batch"}}
    return Subject(torch.nn.Linear(4, 4).train(), inputs={"x": torch.zeros(2, 4)}, axes=axes)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [(("verify", "."), 7), (("build", "--module", "mine.py:subject", "--output", "out"), 3)],
    ids=["bundle", "module"],
)
def test_a_refusal_writes_the_named_reports_and_nothing_else(
    words, code: int, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TRAINING)
    reports = {"--json": "r.json", "--junit": "r.xml", "--html": "r.html"}
    assert run([*words, *(word for pair in reports.items() for word in pair)]) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "mine.py", *reports.values()
    }  # fmt: skip
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["exit_code"], report["passed"]) == (code, False)
    for file in ("r.xml", "r.html"):
        assert html.escape(report["error"][:30], quote=False) in (tmp_path / file).read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("build", "--model", "M"),
        ("compare", "--model", "M", "--graphs", "G"),
        ("range", "--model", "M"),
        ("build", "--model", ".", "--adapter", "M"),
        ("compare", "--model", ".", "--adapter", "M", "--graphs", "G"),
    ],
    ids=lambda words: words[0],
)
def test_a_checkpoint_that_is_no_folder_is_refused_before_torch_is_imported(
    words, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)  # an import would raise
    given = f"attn-export: {words[words.index('M') - 1]} M"
    assert run([*words]) == 2
    assert capsys.readouterr().err == f"{given}: there is no such folder\n"
    (tmp_path / "M").touch()
    assert run([*words]) == 2
    assert capsys.readouterr().err == f"{given} is a file; give its folder, .\n"


def test_a_mismatch_is_exit_code_6_with_output_place_and_numbers(
    cli: Cli, bundle: Path, tmp_path: Path
):
    import onnx

    model = onnx.load(bundle / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    next(a for a in node.attribute if a.name == "scale").f = 1 / 3
    onnx.save(model, tmp_path / "wrong.onnx")
    done = cli("verify", bundle, "--graph", tmp_path / "wrong.onnx", "--runtime", "ort-cpu")
    assert done.returncode == 6
    for word in ("failed ort-cpu", "output", "tolerance", "worst at", "actual", "expected"):
        assert word in done.stdout


@pytest.mark.parametrize(("error", "said"), [
    (OSError(12, "Cannot allocate memory"), "there is too little memory; raise the limit"),
    (RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"), "too little memory"),
    (RuntimeError("can't start new thread"), "there are too few threads; raise the limit"),
    (BlockingIOError(11, "Resource temporarily unavailable"), "there are too few threads"),
])  # fmt: skip
def test_a_lack_of_memory_or_threads_is_called_so(error, said: str, monkeypatch, capsys):
    def raises(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(group, "main", raises)
    assert run(["runtimes"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("number", "after"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 2.5)])
def test_interrupted_it_ends_at_once_and_leaves_nothing(
    number: signal.Signals, after: float, tmp_path: Path
):
    process = subprocess.Popen(
        command(("build", "--variant", "mqa", "--output", "out/mqa")),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=default_signals,
    )  # fmt: skip
    wait_until_handled(process.pid, signal.SIGTERM)
    time.sleep(after)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "Traceback" not in said
    assert list(tmp_path.glob("out/*")) == list(tmp_path.glob("out/.*")) == []


def test_no_argument_says_what_to_try_and_help_has_each_command_once_with_exit_codes(cli: Cli):
    shown = cli("--help").stdout
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert len(re.findall(rf"^  {name} +[A-Z]", shown, re.MULTILINE)) == 1
        summary = " ".join(str(command.help).split("\n\n")[0].split())
        assert summary in " ".join(shown.split()), "it is cut"
    assert re.findall(r"^  (\d+) ", shown, re.MULTILINE) == [*"01234567", "130"]
    tried = cli()
    assert (tried.returncode, tried.stdout) == (2, "")
    assert "attn-export build --variant mqa" in tried.stderr


def test_each_example_of_a_command_is_one_that_it_takes():
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        lines = re.findall(r"^  attn-export (.*)$", command.get_help(context), re.MULTILINE)
        assert lines, name
        for line in lines:
            first, *arguments = shlex.split(line)
            assert first == name
            command.make_context(name, arguments)


def test_the_help_of_build_is_in_groups_with_examples_and_lacks_no_option(cli: Cli):
    short = cli("build", "--help").stdout
    assert len(re.findall(r"^  (?:-\w, )?--(?!help)", short, re.MULTILINE)) == 10
    shown = cli("build", "--help-all").stdout
    for text in (short, shown):
        heads = re.findall(r"^(\w[\w ]+):$", text, re.MULTILINE)
        assert heads == [head for head in GROUPS if head in heads] + ["Examples"]
    command = group.get_command(click.Context(group), "build")
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            flags = ", ".join(parameter.opts)
            lines = re.findall(rf"^  {flags}(?!\S)", shown, re.MULTILINE)
            assert len(lines) == 1, parameter.opts
    assert "-h, --help" in shown


def test_a_field_is_set_by_its_name_or_its_option_but_not_by_both(cli: Cli, tmp_path: Path):
    base = ("build", "--variant", "mqa", "-o", tmp_path / "out")
    for arguments, says in (
        (("--set", "num_heads=8", "--num-heads", "8"), "--set num_heads=8 and its own option"),
        (("--set", "num_heads=x"), "num_heads"),
        (("--set", "head_count=8"), "head_count"),
        (("--set", "scale=1\nbias=none"), "scale"),
        (("--set", "cache=append", "--cache", "none"), "choose one"),
        (("--set", "embed_dim=30", "--set", "dtype=float32"), "embed_dim"),
    ):
        done = cli(*base, *arguments)
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_verbose_lists_each_step_on_stderr(bundle: Path):
    done = subprocess.run(
        command(("verify", bundle, "-v", "--runtime", "ort-cpu")), capture_output=True, text=True
    )
    assert done.returncode == 0
    assert re.search(r"^ +\d+\.\d s  ort-cpu", done.stderr, re.MULTILINE), done.stderr[-300:]


def test_a_reader_that_has_seen_enough_is_no_error(bundle: Path, tmp_path: Path):
    line = " ".join(command(("verify", bundle, "--json", "-")))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{line} | head -c 10"], capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_terminal_gets_a_progress_bar(bundle: Path):
    script = " ".join(command(("verify", bundle, "--runtime", "ort-cpu")))
    shown = subprocess.run(["script", "-qec", script, "/dev/null"], capture_output=True, text=True)
    assert "\x1b[" in shown.stdout
    assert "━" in shown.stdout


@pytest.mark.parametrize(
    ("name", "ours", "given"),
    [("OMP_WAIT_POLICY", "PASSIVE", "ACTIVE"), ("THP_MEM_ALLOC_ENABLE", "1", "0")],
)
def test_the_environment_of_torch_is_set_where_the_user_did_not(
    name: str, ours: str, given: str, tmp_path: Path
):
    code = (
        "import os, sys, attn_export.__main__ as program\n"
        f"program._exit = lambda code: print(os.environ['{name}'])\n"
        "sys.argv = ['attn-export', 'runtimes', '--help']\n"
        "program.main()\n"
    )
    for value, found in ((None, ours), (given, given)):
        inherited = {n: v for n, v in os.environ.items() if n != name}
        environment = inherited | ({name: value} if value else {})
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == found, done.stderr
