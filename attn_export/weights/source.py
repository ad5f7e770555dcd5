"""Storage of a checkpoint's tensors: one file, a folder, or shards with an index.

Headers and tensors are read on demand, so one layer of a large checkpoint costs one
layer. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from attn_export.errors import WeightsError, one_line
from attn_export.weights.file_diagnosis import CONVERT, diagnose
from attn_export.weights.formatting import listed, shown

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Shape and type of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSource:
    """A checkpoint on disk.

    Attributes:
        path: The file, or the index of the shards.
        files: The file of every tensor, by its name.
    """

    path: Path
    files: Mapping[str, Path]

    @property
    def config(self) -> Path:
        """The path of its config.json, if it has one."""
        return self.path.parent / "config.json"

    def describe(self, names: Iterable[str]) -> dict[str, Stored]:
        """Return shape and dtype of some of its tensors; read headers only.

        Raises:
            WeightsError: If a file is missing or broken, or lacks a tensor of the index.
        """
        found = {}
        for file, wanted in self._by_file(names):
            with _opened(file) as handle:
                inside = set(handle.keys())
                for name in wanted:
                    if name not in inside:
                        raise WeightsError(
                            f"{file} has no tensor {shown(name)}, which {self.path.name} says it "
                            "has; download both again"
                        )
                    part = handle.get_slice(name)
                    found[name] = Stored(tuple(part.get_shape()), part.get_dtype())
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return some of its tensors, as views of the file.

        Raises:
            WeightsError: If a file is missing or broken.
        """
        found: dict[str, Tensor] = {}
        for file, wanted in self._by_file(names):
            with _opened(file) as handle:
                found |= {name: handle.get_tensor(name) for name in wanted}
        return found

    def _by_file(self, names: Iterable[str]) -> list[tuple[Path, list[str]]]:
        grouped: dict[Path, list[str]] = {}
        for name in names:
            grouped.setdefault(self.files[name], []).append(name)
        return list(grouped.items())


def open_source(path: Path) -> TensorSource:
    """Return a checkpoint, from its file, the index of its shards, or the folder of either.

    Raises:
        WeightsError: If there is none, if it is a pickle, or if it is broken.
    """
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix in PICKLES:
        raise WeightsError(f"{path} is a pickle by its name; {CONVERT}")
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise WeightsError(f"{path} is no file; give a .safetensors file, its index or its folder")
    if path.suffix == ".json":
        return TensorSource(path, _read_index(path))
    with _opened(path) as handle:
        return TensorSource(path, dict.fromkeys(handle.keys(), path))


def read_json(path: Path, meaning: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: The file.
        meaning: A description of the file, for errors.

    Raises:
        WeightsError: If it cannot be read or holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"cannot read {meaning} {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON: {one_line(error)}; download it again") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds no JSON object; download it again")
    return values


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} {diagnose(file, error)}") from error


def _in_folder(folder: Path) -> Path:
    """Return the checkpoint of a folder: the usual names, or the only one that is there."""
    for usual in (SINGLE, INDEX):
        if (folder / usual).is_file():
            return folder / usual
    indices = sorted(folder.glob("*.safetensors.index.json"))
    found = indices or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = listed(file.name for file in found)
        raise WeightsError(f"{folder} holds {len(found)} checkpoints: {names}; give one of them")
    pickled = [file.name for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
    if pickled:
        raise WeightsError(f"{folder} holds pickles only ({listed(pickled)}); {CONVERT}")
    raise WeightsError(f"{folder} holds no {SINGLE} and no {INDEX}; give the file itself")


def _read_index(path: Path) -> dict[str, Path]:
    weight_map = read_json(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map; give the *.safetensors.index.json")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise WeightsError(
                f"{path} says that {shown(name)} is in {shown(str(shard))!r}, which is no file of "
                "that folder; download the index again"
            )
    return {name: path.parent / shard for name, shard in weight_map.items()}


def _stays_inside(shard: str) -> bool:
    """Return whether the name of a file stays inside its folder.

    The test uses the words of the name and follows no links: Hugging Face's cache links every file
    to another folder.
    """
    if not shard.strip() or not shard.isprintable():
        return False
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.anchor or ".." in path.parts:
            return False
    return True
