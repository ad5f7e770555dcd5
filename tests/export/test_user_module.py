"""`build --module PATH.py:FUNCTION`: the user's own file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export.commands.main import run
from attn_export.errors import UsageError
from attn_export.export.user_module import load_subject

GOOD = """
import torch
from helper_of_mine import WIDTH
from attn_export import Subject

def subject():
    return Subject(
        torch.nn.Linear(WIDTH, 3).eval(),
        inputs={"input": torch.randn(2, 5, WIDTH)},
        axes={"input": {0: "batch", 1: "query_len"}},
        outputs=["scores"],
    )
"""

WRONG = [
    ("x.py", "", 2, "--module is PATH.py:FUNCTION; got 'x.py'"),
    ("x.txt:f", "", 2, "--module is PATH.py:FUNCTION"),
    ("none.py:f", "", 2, "there is no file none.py"),
    ("x.py:f", "def g(): pass", 2, "x.py has no function 'f'"),
    ("x.py:f", "f = 3", 2, "x.py has no function 'f'"),
    ("x.py:f", "def f(): return 3", 2, "returned int, not an attn_export.Subject"),
    ("x.py:f", "def f():\n    return 1 / 0", 3, "raised at x.py:2: ZeroDivisionError"),
    ("x.py:f", "import no_such_package", 3, "ModuleNotFoundError: No module named"),
    ("x.py:f", "x = 1\ndef f(:", 3, "raised at x.py:2: SyntaxError"),
    ("x.py:f", "def f(argument): pass", 3, "raised at x.py: TypeError: f() missing 1 required"),
    (
        "x.py:f",
        "import torch\nfrom attn_export import Subject\ndef f():\n"
        "    return Subject(torch.nn.Linear(2, 2), {'input': torch.ones(2, 2)}, {}, ['y'])",
        3,
        "is in train mode",
    ),
    (
        "x.py:f",
        "import torch\nfrom attn_export import Subject\ndef f():\n"
        "    return Subject(torch.nn.Linear(2, 2).eval(), {'x': torch.ones(2, 2)}, {}, ['y'])",
        2,
        "the inputs x do not fit Linear.forward",
    ),
]


def test_a_module_of_the_users_is_built_under_the_functions_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text(GOOD)
    (tmp_path / "mine" / "helper_of_mine.py").write_text("WIDTH = 8\n")
    assert run(["build", "--module", "mine/own.py:subject", "--runtime", "ort-cpu"]) == 0
    assert "subject: passed" in capsys.readouterr().out
    assert (tmp_path / "models" / "subject" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("reference", "content", "code", "message"), WRONG, ids=lambda x: str(x)[:40]
)
def test_a_wrong_file_is_one_line(
    reference: str, content: str, code: int, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(content)
    before = {path for path in tmp_path.iterdir() if path.name != "__pycache__"}
    assert run(["build", "--module", reference]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


def test_a_module_and_a_spec_at_once_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run(["build", "--module", "x.py:f", "--variant", "mqa"]) == 2
    assert run(["build", "--module", "x.py:f", "--num-heads", "4"]) == 2
    assert "--num-heads with --module" in capsys.readouterr().err


def test_a_change_of_the_same_size_within_a_second_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for name in ("First", "Other"):
        file.write_text(f"class {name}: pass\ndef subject():\n    return {name}()\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))
        with pytest.raises(UsageError, match=f"returned {name}, not"):
            load_subject(f"{file}:subject")


WRONG_PATHS = {
    "build --module nothing.py:f": "there is no file nothing.py",
    "build --module nothing": "--module is PATH.py:FUNCTION",
    "build --module mine.py:f --output mine.py": "mine.py exists and is not a folder",
    "build --module mine.py:f --dialect nothing": "unknown dialect 'nothing'",
    "build nothing/config.json": "nothing/config.json does not exist",
    "compare --module mine.py:f --graph nothing.onnx": "nothing.onnx: no such file",
    "compare --module mine.py:f --graph empty.onnx": "empty.onnx is not an ONNX model",
    "compare --module nothing.py:f --graph empty.onnx": "empty.onnx is not an ONNX model",
    "compare nothing.onnx empty.onnx": "empty.onnx is not an ONNX model",
    "explain --module mine.py:f --graph nothing.onnx": "nothing.onnx: no such file",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Return a folder with a user's file, and a file that is empty."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "mine.py").write_text("import torch")
    (folder / "empty.onnx").touch()
    return folder


def test_paths_and_layers_that_are_wrong_are_refused_before_torch_is_imported(sources: Path):
    code = (
        "import sys; from attn_export.commands.main import run\n"
        "for words in sys.argv[1:]: run([*words.split(), '--runtime', 'onnx-reference'])\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *WRONG_PATHS]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    for line, says in zip(done.stderr.splitlines(), WRONG_PATHS.values(), strict=True):
        assert says in line
