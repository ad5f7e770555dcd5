"""`attn-export lower`: any ONNX file in another dialect, judged by the same golden vectors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx
import pytest
from shared import once

from attn_export import AttentionSpec, build, verify
from attn_export.commands.lower_here import lower_here
from attn_export.commands.main import run
from attn_export.graph import save


def test_the_portable_form_passes_and_one_with_a_wrong_scale_does_not(bundle: Path, tmp_path: Path):
    lowered = tmp_path / "p.onnx"
    source = str(bundle / "model.onnx")
    assert run(["lower", source, "--dialect", "portable", "--output", str(lowered)]) == 0
    assert verify(bundle, graph=lowered, runtimes=["ort-cpu"]).passed
    assert run(["check", str(lowered)]) == 0
    model = onnx.load(lowered)
    (scale,) = [t for t in model.graph.initializer if t.name.startswith("float[]_0.35")]
    scale.CopyFrom(
        onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 1.07, scale.name)
    )
    onnx.save(model, lowered)
    assert verify(bundle, graph=lowered, runtimes=["ort-cpu"]).exit_code == 6


@pytest.fixture
def with_weights_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of a bundle whose weights lie beside its graphs, as do those of others now."""
    monkeypatch.setattr(save, "EXTERNAL_ABOVE", 1)

    def make(folder: Path) -> None:
        assert build(AttentionSpec(embed_dim=64, num_heads=4), folder, runtimes=["ort-cpu"]).passed

    return Path(shutil.copytree(once("weights-beside", make), tmp_path / "b"))


of_one_bundle = pytest.mark.xdist_group("test_lower")


@of_one_bundle
def test_weights_in_a_file_are_shared_beside_it_and_copied_elsewhere(
    tmp_path: Path, with_weights_beside: Path
):
    bundle = with_weights_beside
    source, copy = str(bundle / "model.onnx"), tmp_path / "b2"
    copy.mkdir()
    for output in (tmp_path / "elsewhere.onnx", bundle / "beside.onnx"):
        assert run(["lower", source, "--dialect", "portable", "--output", str(output)]) == 0
    beside = onnx.load(bundle / "beside.onnx", load_external_data=False)
    assert {e.value for t in beside.graph.initializer for e in t.external_data
            if e.key == "location"} == {"weights.safetensors"}  # fmt: skip
    (bundle / "beside.onnx").unlink()
    assert verify(bundle, graph=tmp_path / "elsewhere.onnx", runtimes=["ort-cpu"]).passed
    assert not list(tmp_path.glob(".*"))


def _weights_by_another_name(bundle: Path, how: str) -> Path:
    path = bundle / "other.onnx"
    weights = bundle / save.WEIGHTS
    path.hardlink_to(weights) if how == "hard link" else path.symlink_to(weights)
    return path


@pytest.mark.parametrize("how", ["itself", "hard link", "link"])
@of_one_bundle
def test_the_weights_that_it_reads_are_not_overwritten(
    how: str, with_weights_beside: Path, capsys: pytest.CaptureFixture[str]
):
    bundle = with_weights_beside
    weights = bundle / save.WEIGHTS
    output = weights if how == "itself" else _weights_by_another_name(bundle, how)
    before = weights.read_bytes()
    source = str(bundle / "model.onnx")
    assert run(["lower", source, "--dialect", "portable", "--output", str(output)]) == 2
    assert "holds weights of" in capsys.readouterr().err
    assert weights.read_bytes() == before


EXISTING = {
    "a text": lambda path: path.write_text("mine"),
    "a folder": lambda path: path.mkdir(),
    "a dead link": lambda path: path.symlink_to("nowhere"),
    "a pipe": lambda path: os.mkfifo(path),
    "the model by a link": lambda path: path.symlink_to(path.parent / "m.onnx"),
    "the model by a hard link": lambda path: path.hardlink_to(path.parent / "m.onnx"),
}


@pytest.mark.parametrize("existing", EXISTING)
def test_a_file_that_is_no_graph_is_not_replaced(
    existing: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, output = tmp_path / "m.onnx", tmp_path / "o.onnx"
    shutil.copyfile(bundle / "model.onnx", model)
    EXISTING[existing](output)
    before = (output.lstat().st_ino, model.read_bytes())
    assert run(["lower", str(model), "--dialect", "portable", "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "choose another --output" in said
    assert (output.lstat().st_ino, model.read_bytes()) == before


def test_large_weights_have_the_name_of_their_content_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "out" / "o.onnx"
    output.parent.mkdir()
    theirs = output.with_name("o.onnx.0123456789abcdef.data")
    theirs.write_text("not what the name says")
    output.touch()  # an empty file is nothing to keep
    named = []
    for seed in (0, 1):
        bundle = tmp_path / str(seed)
        spec = AttentionSpec(embed_dim=64, num_heads=4)
        options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
        assert build(spec, bundle, seed=seed, **options).passed
        with monkeypatch.context() as patch:
            patch.setattr(save, "EXTERNAL_ABOVE", 1)
            source = str(bundle / "model.onnx")
            lower_here(source, str(output), "portable")
        (data,) = set(output.parent.iterdir()) - {output, theirs}
        assert save.sha256(data).startswith(data.name.split(".")[2])
        assert verify(bundle, graph=output, runtimes=["ort-cpu"]).passed
        named.append(data.name)
    assert named[0] != named[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{m}", "--dialect", "nowhere", "--output", "o.onnx"], 2, "unknown dialect 'nowhere'"),
        (["{m}", "--dialect", "portable", "--output", "{m}"], 2, "is the file to read"),
        (["none.onnx", "--dialect", "portable", "--output", "o.onnx"], 2, "cannot read none.onnx"),
        (["{m}", "--dialect", "portable", "--output", "no/such/o.onnx"], 2, "cannot write no/such"),
        (["{m}", "--dialect", "portable"], 2, "--output"),
    ],
)
def test_an_impossible_lowering_is_one_line(
    arguments: list[str], code: int, message: str, bundle: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = [word.format(m=bundle / "model.onnx") for word in arguments]
    assert run(["lower", *given]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
