"""The kit in Python, as a user has it: in a folder of its own, installed, run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from shared import bundle_of

from attn_export import build
from attn_export.errors import BundleError, OutputError, UsageError
from attn_export.jobs.kit import write_kit
from attn_export.spec import AttentionSpec

NAMES = ("append", "in-place", "no-cache", "float16")


def run(kit: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the kit, with nothing on the path but the kit itself."""
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


@pytest.mark.parametrize(
    ("name", "says"),
    [("append", "then 8 tokens"), ("in-place", "then 8 tokens"), ("no-cache", "no KV cache")],
)
def test_it_decodes(name: str, says: str, tmp_path: Path):
    kit = write_kit("python", bundle_of(name), tmp_path / "kit")
    done = run(kit, "decode", "--tokens", "8")
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


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


@pytest.mark.parametrize("file", ["golden/test_data_set_0/input_0.pb", "model.ort.onnx"])
def test_a_damaged_file_is_one_line_and_exit_code_2(file: str, tmp_path: Path):
    kit = write_kit("python", bundle_of("append"), tmp_path / "kit")
    path = kit / "bundle" / file
    path.write_bytes(path.read_bytes()[:40])
    done = run(kit, "self_test")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_graph_is_the_fastest_that_holds_caches_as_the_signature_says(tmp_path: Path):
    settings = "attn_kit/settings.py"
    of_append = (write_kit("python", bundle_of("append"), tmp_path / "a") / settings).read_text()
    assert 'GRAPH = "model.ort.onnx"' in of_append
    spec = AttentionSpec(embed_dim=16, num_heads=4, num_kv_heads=1, cache="in-place", causal=True)
    build(spec, tmp_path / "b")  # there ort holds values transposed
    of_mqa = (write_kit("python", tmp_path / "b", tmp_path / "c") / settings).read_text()
    assert 'GRAPH = "model.onnx"' in of_mqa


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(UsageError, match="unknown language 'fortran'; choose from c, cpp"):
        write_kit("fortran", bundle_of("append"), tmp_path / "kit")
    with pytest.raises(UsageError, match="runs portable, not ort"):
        write_kit("web", bundle_of("append"), tmp_path / "kit", dialect="ort")
    with pytest.raises(BundleError, match="no bundle"):
        write_kit("python", tmp_path / "nothing", tmp_path / "kit")
    assert not list(tmp_path.iterdir())
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "mine").write_text("mine")
    with pytest.raises(OutputError, match="is not empty"):
        write_kit("python", bundle_of("append"), tmp_path / "kit")
    assert [p.name for p in tmp_path.rglob("*")] == ["kit", "mine"]


def test_bfloat16_is_refused_where_the_engines_interface_has_none(tmp_path: Path):
    with pytest.raises(UsageError, match="query is bfloat16, which the python kit cannot hold"):
        write_kit("python", bundle_of("bfloat16"), tmp_path / "kit")
