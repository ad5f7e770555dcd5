"""Limits on what is read from files: time, memory, characters, paths and nesting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from conftest import Cli
from onnx import TensorProto, helper

from attn_export import AttentionSpec, build
from attn_export.errors import LINE, GraphError, UsageError, printable
from attn_export.graph.load import load_graph, load_model
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits
from attn_export.schema import Dtype
from attn_export.tensorproto import CODES
from attn_export.untrusted_files import checked, parse_json, read_bytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ü, 注意", "plain text, ü, 注意"),
        ("two\n::error::lines\r\n", "two ::error::lines"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("right\u202eto left", r"right\u202eto left"),
        ("no text \udcff", r"no text \udcff"),
        ("x\x00y", r"x\x00y"),
        (12, "12"),
    ],
)
def test_a_foreign_text_is_one_line_that_is_only_shown(text: object, shown: str):
    assert printable(text) == shown
    assert str(UsageError(text)) == shown


def test_a_long_text_keeps_its_start_and_its_end():
    shown = printable("a" * 1000 + "b" * 1000)
    assert len(shown) == LINE
    assert re.fullmatch("a+…b+", shown)


def calls_in_calls(path: Path, depth: int = 30) -> Path:
    """Write a model of functions that each call the one before twice."""
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("x", 1)]
    first = [helper.make_node("Abs", ["a"], ["b"])]
    functions = [helper.make_function("x", "f0", ["a"], ["b"], first, sets[:1])]
    for number in range(1, depth):
        calls = [
            helper.make_node(f"f{number - 1}", [one], [other], domain="x")
            for one, other in (("a", "c"), ("c", "b"))
        ]
        functions.append(helper.make_function("x", f"f{number}", ["a"], ["b"], calls, sets))
    p, q = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "pq")
    call = helper.make_node(f"f{depth - 1}", ["p"], ["q"], domain="x")
    graph = helper.make_graph([call], "g", [p], [q])
    model = helper.make_model(graph, opset_imports=sets, functions=functions, ir_version=10)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("command", ["check", "lower"])
def test_functions_that_call_functions_are_counted_first(command: str, cli: Cli, tmp_path: Path):
    path = calls_in_calls(tmp_path / "bomb.onnx")
    words = ["--dialect", "ort", "--output", str(tmp_path / "o.onnx")] if command == "lower" else []
    started = time.monotonic()
    ran = cli(command, str(path), *words)
    assert ran.returncode == 4
    assert "calls functions in functions: it has more than 10000000 nodes" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert time.monotonic() - started < 60


def test_a_function_that_calls_itself_is_refused(tmp_path: Path):
    path = calls_in_calls(tmp_path / "m.onnx", 3)
    model = onnx.load(path)
    model.functions[0].node[0].op_type, model.functions[0].node[0].domain = "f2", "x"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(GraphError, match=r"the function f\d calls itself"):
        load_graph(path)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("subprocess:check_call", {"args": ["sleep", "60"]}, "f takes longer than 1 s to read"),
        ("os:abort", {}, "f cannot be read: a process that tried it ended with signal SIGABRT"),
        ("numpy:ones", {"shape": 10**9}, "f: MemoryError: Unable to allocate"),
        (
            "attn_export.commands.check:check_here",
            {"path": "none"},
            "cannot read none: no such file",
        ),
    ],
)
def test_a_call_in_a_process_of_its_own_ends_in_one_line(function: str, arguments, message: str):
    limits = Limits(1, 1.0 if "args" in arguments else 60.0, 2000)
    with pytest.raises((GraphError, UsageError), match=f"^{re.escape(message)}"):
        limited(function, "f", limits, **arguments)


def external(tmp_path: Path, location: str, length: int = 16) -> Path:
    """Write a model of one weight that lies in another file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "inside").write_bytes(bytes(16))
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "fifo")
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("length", str(length))):
        weight.external_data.add(key=key, value=value)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    node = helper.make_node("Abs", ["w"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [], [y], [weight]))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("location", "length", "message"),
    [
        ("../secret", 16, "outside the folder"), ("/etc/passwd", 16, "outside the folder"),
        ("", 16, "outside the folder"), ("link", 16, "a link out of the folder"),
        ("fifo", 16, "which is missing"), ("inside", 12, "takes 12 bytes, not 16"),
        ("inside", 99, "takes 99 bytes, not 16"), ("none", 16, "which is missing"),
    ],
)  # fmt: skip
def test_external_data_lies_in_the_folder_and_is_all_there(
    location, length, message, tmp_path: Path
):
    path = external(tmp_path, location, length)
    for load in (load_graph, load_model):
        with pytest.raises(GraphError, match=message):
            load(path)


def test_external_data_inside_the_folder_is_read(tmp_path: Path):
    path = external(tmp_path, "inside")
    (weight,) = load_model(path).graph.initializer
    assert weight.raw_data == bytes(16)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path):
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read_bytes(path)


def test_a_file_is_not_read_beyond_its_limit(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(11))
    assert len(read_bytes(path, 11)) == 11
    with pytest.raises(OSError, match="it has 11 bytes, and 10 is the most"):
        read_bytes(path, 10)


@pytest.mark.parametrize("text", ["[" * 200_000, "{" * 10, "", "9" * 5000, "nul"])
def test_invalid_json_is_a_value_error(text: str):
    with pytest.raises(ValueError, match=r"\S"):
        parse_json(text)


def test_all_types_of_tensors_are_types_of_a_manifest():
    for name in CODES:
        assert checked(name, Dtype) == name
    with pytest.raises(ValueError, match="float128"):
        checked("float128", Dtype)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "n" * 400, "no text \udcff"])
def test_a_bundle_has_a_printable_name(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match="must be one printable line"):
        build(AttentionSpec(embed_dim=8, num_heads=1), tmp_path / "b", name=name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_line(tmp_path: Path):
    code = "import sys; sys.modules['torch'] = None\nfrom attn_export.commands.main import run\n"
    code += "sys.exit(run(['build', '--variant', 'mqa', '--output', 'b', '--quiet']))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 2
    assert "torch is not installed; " in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["verify"], ["explain", "--runtime", "ort-cpu"]])
def test_a_command_that_evaluates_graphs_limits_its_own_memory(
    command: list[str], bundle: Path, tmp_path: Path
):
    code = (
        "import resource, sys; from attn_export.commands.main import cli; "
        f"cli({[*command, str(bundle), '--quiet']}, standalone_mode=False); "
        "print(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) == Limits.default().memory_mib
