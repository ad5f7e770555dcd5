"""Sources of a checkpoint, and invalid files: one line of error each."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from attn_export.errors import WeightsError
from attn_export.weights.source import INDEX, SINGLE, open_source

STORED = {f"model.layers.0.self_attn.{side}_proj.weight": torch.randn(8, 8) for side in "qkvo"}


def save(folder, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE)
    return folder / SINGLE


def save_sharded(folder, shards):
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder / INDEX


def load(path):
    """Return all tensors of a checkpoint."""
    source = open_source(Path(path))
    source.describe(source.files)
    return source.read(source.files)


def same(path):
    found = load(path)
    equal = (torch.equal(found[name], tensor) for name, tensor in STORED.items())
    return found.keys() == STORED.keys() and all(equal)


def refusal(path):
    with pytest.raises(WeightsError) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
    return str(error.value)


# -- files, folders, shards ----------------------------------------------------------------------


def test_a_file_and_its_folder_are_the_same_checkpoint(tmp_path):
    path = save(tmp_path, STORED)
    for place in (path, tmp_path, str(tmp_path)):
        assert same(place)


def test_the_only_file_of_a_folder_is_taken_whatever_its_name(tmp_path):
    save(tmp_path, STORED).rename(tmp_path / "pytorch_lora.safetensors")
    assert same(tmp_path)


def test_of_two_files_none_is_taken(tmp_path):
    path = save(tmp_path, STORED)
    (tmp_path / "a.safetensors").write_bytes(path.read_bytes())
    path.rename(tmp_path / "b.safetensors")
    assert "holds 2 checkpoints: a.safetensors, b.safetensors; give one" in refusal(tmp_path)


def test_a_checkpoint_may_lie_in_several_shards(tmp_path):
    names = sorted(STORED)
    halves = {"1.safetensors": names[:2], "2.safetensors": names[2:]}
    index = save_sharded(tmp_path, {f: {n: STORED[n] for n in half} for f, half in halves.items()})
    for place in (index, tmp_path):
        assert same(place)


def test_a_linked_folder_as_in_the_cache_of_hugging_face_is_read(tmp_path):
    blob = save(tmp_path / "blobs", STORED)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "1.safetensors").symlink_to(blob)
    index = {"weight_map": dict.fromkeys(STORED, "1.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(snapshot)


# -- an index that cannot be true ----------------------------------------------------------------


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "..\\x", "\\\\host\\x", "", " ",
     "a\nb",
     7, None, ["x"]],
    ids=repr,
)  # fmt: skip
def test_an_index_does_not_lead_out_of_its_folder(shard, tmp_path):
    inside = tmp_path / "inside"
    index = save_sharded(inside, {"x.safetensors": STORED})
    (tmp_path / "x.safetensors").write_bytes((inside / "x.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STORED, shard)}))
    assert "which is not a file of that folder" in refusal(index)


def test_an_index_that_names_a_tensor_the_shard_lacks(tmp_path):
    lacking = dict(list(STORED.items())[1:])
    index = save_sharded(tmp_path, {"1.safetensors": lacking})
    values = json.loads(index.read_text())
    values["weight_map"] |= dict.fromkeys(STORED, "1.safetensors")
    index.write_text(json.dumps(values))
    message = refusal(index)
    assert f"has no tensor {next(iter(STORED))}, which model.safetensors.index.json says" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"), ("[]", "holds no JSON object"), ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"), ('{"weight_map": 3}', "has no weight_map"),
    ],
)  # fmt: skip
def test_an_index_that_is_none(text, message, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text, encoding="latin-1")
    assert message in refusal(index)


def test_an_index_that_is_not_there(tmp_path):
    assert "No such file" in refusal(tmp_path / "model.safetensors.index.json")


# -- files that are no safetensors ---------------------------------------------------------------


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": (b"", "is empty"),
    "short": (b"abc", "is truncated: it has 3 bytes"),
    "no header": (b"some text that is no checkpoint at all", "does not start with a header"),
    "header not JSON": (with_header(b"{oops}"), "has a header that is not JSON"),
    "header not UTF-8": (with_header(b"{\xff\xfe}"), "has a header that is not JSON"),
    "header a list": (with_header([]), "does not start with a header"),
    "deep header": (with_header(b"{" + b'"a":{' * 50_000), "has a header that is not JSON"),
    "huge header": (struct.pack("<Q", 10**12) + b"{}", "does not start with a header"),
    "cut header": (with_header({"a": ONE}, bytes(8))[:30], "its header alone takes"),
    "cut data": (with_header({"a": ONE}, bytes(5)), "is truncated: it has"),
    "more data": (with_header({"a": ONE}, bytes(9)), "has 1 bytes more than the"),
    "offsets": (with_header({"a": {**ONE, "data_offsets": [0, 4]}}, bytes(4)), "is broken"),
    "unknown type": (with_header({"a": {**ONE, "dtype": "X9"}}, bytes(8)), "is broken"),
    "no offsets": (with_header({"a": {}}), "is broken"),
    "an entry of another kind": (with_header({"a": 3}), "is broken"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_line_that_says_how(content, message, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert message in refusal(path)
    assert str(path) in refusal(path)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, data):
    path = save(tmp_path_factory.mktemp("cut"), STORED)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    message = refusal(path)
    assert "truncated" in message or "empty" in message


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_or_read(tmp_path_factory, data):
    path = save(tmp_path_factory.mktemp("bent"), STORED)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, 600))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    said = ""
    try:
        load(path)
    except WeightsError as error:
        said = str(error)
    assert "\n" not in said


def test_a_header_of_640_bytes_is_not_taken_for_a_pickle(tmp_path):
    # Its length starts with the bytes 0x80 0x02, as a pickle does.
    path = tmp_path / "model.safetensors"
    text = json.dumps({"a": ONE}).encode()
    path.write_bytes(with_header(text + b" " * (640 - len(text)), bytes(3)))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert "is truncated" in refusal(path)


def test_a_path_that_is_no_file(tmp_path):
    assert "does not exist" in refusal(tmp_path / "missing.safetensors")
    assert "does not exist" in refusal(tmp_path / "no" / "such" / "folder")
    assert "holds no model.safetensors" in refusal(tmp_path)
    (tmp_path / "1.safetensors").mkdir()
    index = {"weight_map": dict.fromkeys(STORED, "1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is a folder" in refusal(tmp_path)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refusal(tmp_path / "pipe.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "pipe.safetensors"}}))
    source = open_source(tmp_path / INDEX)
    for read in (source.describe, source.read):
        with pytest.raises(WeightsError, match="not a regular file"):
            read(["a.weight"])
    os.mkfifo(tmp_path / "pipe.json")
    assert "not a regular file" in refusal(tmp_path / "pipe.json")


# -- pickles -------------------------------------------------------------------------------------


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Return a pickle that leaves a trace when it is read."""
    monkeypatch.chdir(tmp_path)
    return pickle.dumps(Trap())


def is_refused(path, tmp_path):
    message = refusal(path)
    assert "safetensors.torch.save_file(torch.load(FILE" in message
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
def test_a_pickle_is_refused_by_its_name(suffix, trap, tmp_path):
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(trap)
    is_refused(path, tmp_path)
    is_refused(tmp_path, tmp_path)


def test_a_pickle_is_refused_by_its_content(trap, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(trap)
    is_refused(path, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", trap)
    is_refused(path, tmp_path)
