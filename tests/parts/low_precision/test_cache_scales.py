"""Scales of a cache of integers that come from a file, or from hidden states."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_spec
from onnx import numpy_helper
from safetensors.numpy import save_file

from attn_export import Subject, build, verify
from attn_export.commands.main import run
from attn_export.errors import ExportError, UsageError
from attn_export.graph.load import load_model
from attn_export.spec import AttentionSpec

GOOD = {"k_scale": np.float32(0.02), "v_scale": np.float32(0.015)}


def spec_of(**changes: object) -> AttentionSpec:
    return small_spec(**{"cache": "in-place", "kv_dtype": "int8", "attn_mask": "none", **changes})


def written(folder: Path, **arrays: object) -> Path:
    path = folder / "scales.npz"
    np.savez(path, **arrays)
    return path


def held(bundle: Path) -> dict[str, np.ndarray]:
    graph = load_model(bundle / "model.onnx").graph
    return {t.name: numpy_helper.to_array(t) for t in graph.initializer}


@pytest.mark.parametrize("kv_scale", ["per-tensor", "per-channel"])
def test_scales_of_a_file_are_those_of_the_graph(kv_scale: str, tmp_path: Path):
    spec = spec_of(kv_scale=kv_scale)
    shape = (2, 8) if kv_scale == "per-channel" else (1,)
    rng = np.random.default_rng(0)
    scales = {name: rng.uniform(0.01, 0.03, shape).astype(np.float32) for name in GOOD}
    path = tmp_path / "scales.safetensors"
    save_file(scales, path)
    bundle = tmp_path / "b"
    subject = Subject.from_spec(spec, kv_scales=path)
    report = build(subject, bundle, name="small", dialects=["standard"], runtimes=["ort-cpu"])
    assert report.passed, str(report)
    assert "the scales of the int8 cache are those of scales.safetensors" in report.notes
    assert not [note for note in report.notes if "from a seed" in note]
    assert 'kv_scales_from = "file"' in (bundle / "spec.toml").read_text()
    for name, scale in scales.items():
        assert np.array_equal(held(bundle)[f"kv_scales.{name}"].ravel(), scale.ravel())
    again = verify(bundle, runtimes=["ort-cpu"], recompute=True)
    assert again.passed, str(again)


def test_a_bundle_is_built_again_from_its_own_files(tmp_path: Path):
    path = written(tmp_path, **GOOD)
    first, again = tmp_path / "b", tmp_path / "again"
    plain = ["--dialect", "standard", "--runtime", "ort-cpu", "--quiet"]
    spec = tmp_path / "layer.toml"
    spec.write_text(spec_of().to_toml())
    given = [str(spec), "--kv-scales", str(path)]
    assert run(["build", *given, "--output", str(first), *plain]) == 0
    files = [str(first / "spec.toml"), "--kv-scales", str(first / "kv_scales.npz")]
    assert run(["build", *files, "--output", str(again), *plain]) == 0
    hashes = [json.loads((b / "manifest.json").read_text())["files"] for b in (first, again)]
    same = {"spec.toml", "model.onnx", "kv_scales.npz", "golden/index.json"}
    assert {name: hashes[0][name] for name in same} == {name: hashes[1][name] for name in same}


def test_a_spec_whose_scales_are_missing_is_refused():
    spec = spec_of(kv_scales_from="file")
    with pytest.raises(UsageError, match="no scales are given; name their file"):
        build(spec)


def npz(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def npy(array: np.ndarray, claimed: str = "(1,), }") -> bytes:
    """Return an .npy file whose header may claim another shape."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue().replace(b"(1,), }         ", claimed.encode().ljust(16))


ONE = np.ones(1, np.float32)
REFUSED: dict[str, tuple[object, str]] = {
    "shape": ({**GOOD, "k_scale": np.ones(3, np.float32)}, r"k_scale has the shape \[3\]"),
    "by channel": ({**GOOD, "v_scale": np.ones((2, 8), np.float32)}, "kv_scale = 'per-tensor'"),
    "float64": ({**GOOD, "k_scale": np.ones(1)}, "k_scale is float64; store scales as float32"),
    "integers": ({**GOOD, "k_scale": np.ones(1, int)}, "k_scale is int64"),
    "zero": ({**GOOD, "v_scale": np.zeros(1, np.float32)}, "v_scale holds 0; a scale is a number"),
    "negative": ({**GOOD, "v_scale": -ONE}, "v_scale holds -1"),
    "nan": ({**GOOD, "v_scale": ONE * np.nan}, "v_scale holds nan"),
    "infinite": ({**GOOD, "v_scale": ONE * np.inf}, "v_scale holds inf"),
    "denormal": ({**GOOD, "v_scale": ONE * 1e-40}, "v_scale holds 9.99995e-41"),
    "one alone": ({"k_scale": ONE}, "has no v_scale"),
    "other names": ({**GOOD, "scale": ONE}, "1 array of another name: scale; it may hold"),
    "nothing": ({}, "holds no arrays"),
    "objects": (npz(k_scale=npy(np.array([{}])), v_scale=npy(ONE)), "not a .npz file"),
    "a huge claim": (npz(k_scale=npy(ONE, "(9999999999,), }"), v_scale=npy(ONE)), "are no"),
    "a bomb": (npz(k_scale=bytes(2**27)), "takes 134217728 bytes, and 67108864 is the most"),
    "no archive": (b"PK\3\4 and no more", "is not a .npz file: BadZipFile"),
    "empty": (b"", "is not a .npz file"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "says"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_does_not_fit_is_refused_in_one_line(content, says: str, tmp_path: Path):
    path = tmp_path / "scales.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(UsageError, match=says) as error:
        Subject.from_spec(spec_of(), kv_scales=path)
    assert len(str(error.value).splitlines()) == 1
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone.npz", "No such file"),
        ("gone.safetensors", "does not exist"),
        ("s.pt", "must end in .npz"),
    ],
)
def test_a_file_of_another_kind_is_refused(name: str, says: str, tmp_path: Path):
    with pytest.raises(UsageError, match=says):
        Subject.from_spec(spec_of(), kv_scales=tmp_path / name)


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_a_safetensors_file_of_more_than_64_mib_is_refused(dtype: str, tmp_path: Path):
    """Check the limit on a sparse file, which takes no space on disk."""
    width = int(dtype[1:]) // 8
    count = 2**26 // width
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, width * count]}
    header = json.dumps({"k_scale": entry}).encode()
    path = tmp_path / "scales.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    size = 8 + len(header) + width * count
    os.truncate(path, size)
    with pytest.raises(UsageError, match=f"has {size} bytes, and 67108864 is the most"):
        Subject.from_spec(spec_of(), kv_scales=path)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "scales.npz")
    with pytest.raises(UsageError, match="not a regular file"):
        Subject.from_spec(spec_of(), kv_scales=tmp_path / "scales.npz")


def test_scales_without_a_cache_of_integers_are_refused(tmp_path: Path, capsys):
    path = str(written(tmp_path, **GOOD))
    out = str(tmp_path / "b")
    assert run(["build", "--variant", "gqa", "--kv-scales", path, "--output", out]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "set kv_dtype to int8 or int4" in said
    assert run(["build", "--module", "mine.py:f", "--kv-scales", path, "--output", out]) == 2
    assert "--kv-scales with --module" in capsys.readouterr().err


def test_scales_of_a_file_change_what_the_module_keeps(tmp_path: Path):
    subject = Subject.from_spec(spec_of(), kv_scales=written(tmp_path, **GOOD))
    scales = subject.module.kv_scales
    key = torch.full((1, 2, 1, 8), 0.1)
    assert scales(key, key)[0].unique().tolist() == [5]
    assert subject.module.spec.kv_scales_from == subject.spec.kv_scales_from == "file"


# -- hidden states ------------------------------------------------------------------------------


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*shape, 32)).astype(np.float32)


def keys_and_values(subject: Subject, query: np.ndarray) -> list[np.ndarray]:
    """Return new keys and values `[B, Hkv, L, D]` of a layer without norms and positions."""
    module = subject.module
    x = torch.from_numpy(query)
    with torch.no_grad():
        made = [layer(x).unflatten(-1, (2, -1)) for layer in (module.k_proj, module.v_proj)]
    return [part.transpose(1, 2).numpy() for part in made]


@pytest.mark.parametrize("kv_scale", ["per-tensor", "per-channel"])
def test_scales_are_the_largest_keys_and_values_of_hidden_states(kv_scale: str, tmp_path: Path):
    query = tokens(3, 50) * 2
    path = tmp_path / "hidden.npz"
    np.savez(path, query=query)
    subject = Subject.from_spec(spec_of(kv_scale=kv_scale), calibrate=path)
    axes = (0, 2) if kv_scale == "per-channel" else None
    for name, rows in zip(GOOD, keys_and_values(subject, query), strict=True):
        scale = subject.module.kv_scales.get_buffer(name).numpy()
        np.testing.assert_allclose(scale.squeeze(), abs(rows).max(axes) / 127, rtol=1e-5)
    (note,) = (note for note in subject.notes if "scales" in note)
    assert "calibrated" in note
    assert "150 tokens of hidden.npz" in note
    assert subject.spec.kv_scales_from == "data"


@pytest.mark.parametrize("kv_scale", ["per-tensor", "per-channel"])
def test_scales_of_4_bits_are_those_of_the_least_squared_error(kv_scale: str):
    query = tokens(8, 64)
    spec = spec_of(kv_dtype="int4", kv_scale=kv_scale)
    subject = Subject.from_spec(spec, calibrate=lambda: [{"query": query}])
    axes = (0, 2) if kv_scale == "per-channel" else None
    for name, rows in zip(GOOD, keys_and_values(subject, query), strict=True):
        found = subject.module.kv_scales.get_buffer(name).numpy()

        def noise(scale: np.ndarray, x: np.ndarray = rows) -> np.ndarray:
            return np.square(np.clip(np.rint(x / scale), -8, 7) * scale - x).sum(axes)

        tried = [noise(found * factor) for factor in np.geomspace(0.5, 3, 60)]
        assert (noise(found) <= 1.05 * np.min(tried, axis=0)).all()
        largest = abs(rows).max(axes).reshape(found.shape)
        assert noise(found).sum() < 0.7 * noise(largest / 7).sum()
    assert any("those of the least squared error" in note for note in subject.notes)


def test_a_function_gives_batches_of_any_length():
    batches = [tokens(2, 9), tokens(1, 40, seed=1)]
    spec = spec_of()
    found = Subject.from_spec(spec, calibrate=lambda: ({"query": batch} for batch in batches))
    alone = [Subject.from_spec(spec, calibrate=lambda b=b: [{"query": b}]) for b in batches]
    for name in GOOD:
        scales = [s.module.kv_scales.get_buffer(name) for s in (found, *alone)]
        assert scales[0] == max(scales[1:])
    assert any("58 tokens of a function" in note for note in found.notes)


def test_positions_turn_the_keys_that_scales_are_of():
    spec, query = spec_of(rotary="half", position_ids=True, kv_scale="per-channel"), tokens(2, 8)

    def at(start: int) -> list[dict[str, np.ndarray]]:
        return [{"query": query, "position_ids": np.arange(8)[None].repeat(2, 0) + start}]

    usual, first, later = (
        Subject.from_spec(spec, calibrate=of).module.kv_scales
        for of in (lambda: [{"query": query}], lambda: at(0), lambda: at(100))
    )
    assert torch.equal(usual.k_scale, first.k_scale)
    assert not torch.equal(first.k_scale, later.k_scale)
    assert torch.equal(first.v_scale, later.v_scale)


def test_a_bundle_of_calibrated_scales_says_so(tmp_path: Path, capsys):
    np.savez(tmp_path / "hidden.npz", query=tokens(2, 30).astype(np.float64))
    spec, bundle = tmp_path / "layer.toml", tmp_path / "b"
    spec.write_text(spec_of().to_toml())
    given = [str(spec), "--calibrate", str(tmp_path / "hidden.npz"), "--output", str(bundle)]
    assert run(["build", *given, "--dialect", "standard", "--runtime", "ort-cpu"]) == 0
    assert "60 tokens of hidden.npz" in capsys.readouterr().out
    assert 'kv_scales_from = "data"' in (bundle / "spec.toml").read_text()
    stored = np.load(bundle / "kv_scales.npz")
    assert all(stored[name] == held(bundle)[f"kv_scales.{name}"] for name in GOOD)


BAD = {
    "width": ({"query": np.ones((1, 2, 31), np.float32)}, r"float32 \[1, 2, 31\]; .*\[B, L, 32\]"),
    "rank": ({"query": np.ones((2, 32), np.float32)}, r"float32 \[2, 32\]"),
    "integers": ({"query": np.ones((1, 2, 32), int)}, "query of .* is int64"),
    "nan": ({"query": tokens(1, 2) * np.nan}, "query of .* holds NaN, or an infinity"),
    "beyond float32": ({"query": tokens(1, 2).astype(float) * 1e300}, "holds NaN, or an infinity"),
    "no tokens": ({"query": tokens(0, 2)}, "have no tokens"),
    "no query": ({"position_ids": np.zeros((1, 2), int)}, "gives position_ids; hidden states are"),
    "positions": (
        {"query": tokens(1, 2), "position_ids": np.zeros((1, 3), int)},
        r"int64 \[1, 3\]; .*\[1, 2\]",
    ),
    "below 0": ({"query": tokens(1, 2), "position_ids": np.full((1, 2), -1)}, "must be from 0"),
    "other names": ({"query": tokens(1, 2), "key": tokens(1, 2)}, "another name: key"),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "says"), BAD.values(), ids=BAD)
def test_hidden_states_that_do_not_fit_are_refused(arrays, says: str, tmp_path: Path):
    path = tmp_path / "hidden.npz"
    np.savez(path, **arrays)
    with pytest.raises(UsageError, match=says) as error:
        Subject.from_spec(spec_of(rotary="half", position_ids=True), calibrate=path)
    assert len(str(error.value).splitlines()) == 1


def test_a_function_that_raises_or_gives_something_else_is_refused(tmp_path: Path):
    def wrong() -> list[dict[str, np.ndarray]]:
        raise KeyError("nothing")

    with pytest.raises(ExportError, match=r"calibrate\(\) raised in .*test_cache_scales.py:\d+"):
        Subject.from_spec(spec_of(), calibrate=wrong)
    with pytest.raises(UsageError, match="a function gives list; hidden states are query"):
        Subject.from_spec(spec_of(), calibrate=lambda: [[1.0]])
    with pytest.raises(UsageError, match="what is not an array"):
        Subject.from_spec(spec_of(), calibrate=lambda: [{"query": "text"}])
    path = written(tmp_path, **GOOD)
    with pytest.raises(UsageError, match="both given; choose one"):
        Subject.from_spec(spec_of(), kv_scales=path, calibrate=path)
    with pytest.raises(UsageError, match="calibrate with kv_dtype = 'none'"):
        Subject.from_spec(small_spec(), calibrate=lambda: [{"query": tokens(1, 2)}])
