"""Access to the tensors of a checkpoint: one safetensors file, a folder, or shards with an index.

Headers and tensors are read on demand. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from attn_export.errors import WeightsError, one_line
from attn_export.untrusted_files import (
    LONGEST_HEADER,
    open_regular,
    parse_json,
    read_text,
    safetensors_entries,
)

if TYPE_CHECKING:
    from torch import Tensor

SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
_CONVERT: Final = (
    "reading it could run code; convert it where you trust it: safetensors.torch.save_file("
    "torch.load(FILE, map_location='cpu', weights_only=True), 'model.safetensors')"
)
_FROM_GGUF: Final = (
    "convert it: transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME)"
    ".save_pretrained(OUT)"
)
_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Shape and type of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSource:
    """A checkpoint on disk."""

    path: Path
    files: Mapping[str, Path]

    @property
    def config(self) -> Path:
        """The path of its config.json, if it has one."""
        return self.path.parent / CONFIG

    def describe(self, names: Iterable[str]) -> dict[str, Stored]:
        """Return the shape and the dtype of some tensors, from the headers of files."""
        described = {}
        for file, names_in_file in self._by_file(names):
            with _opened(file) as handle:
                stored = set(handle.keys())
                for name in names_in_file:
                    if name not in stored:
                        raise WeightsError(
                            f"{file} has no tensor {shown(name)}, which {self.path.name} says it "
                            "has; download both again"
                        )
                    tensor = handle.get_slice(name)
                    described[name] = Stored(tuple(tensor.get_shape()), tensor.get_dtype())
        return described

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return some tensors, as views of the mapped file."""
        tensors: dict[str, Tensor] = {}
        for file, names_in_file in self._by_file(names):
            with _opened(file, "pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in names_in_file}
        return tensors

    def _by_file(self, names: Iterable[str]) -> list[tuple[Path, list[str]]]:
        grouped: dict[Path, list[str]] = {}
        for name in names:
            grouped.setdefault(self.files[name], []).append(name)
        return list(grouped.items())


def open_source(path: Path) -> TensorSource:
    """Open a checkpoint, given its file, the index of its shards, or the folder of either."""
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix == ".gguf":
        raise WeightsError(f"{path} is GGUF by its name; {_FROM_GGUF}")
    if path.suffix in _PICKLES:
        raise WeightsError(f"{path} is a pickle by its name; {_CONVERT}")
    if path.suffix == ".json":
        return TensorSource(path, _read_index(path))
    with _opened(path) as handle:
        return TensorSource(path, dict.fromkeys(handle.keys(), path))


def read_json(path: Path, meaning: str) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise WeightsError(f"cannot read {meaning} {path}: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {one_line(error)}; download it again") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds no JSON object; download it again")
    return values


@contextlib.contextmanager
def _opened(file: Path, framework: str = "numpy") -> Iterator[Any]:
    # With "pt" it imports torch, which headers do not need.
    try:
        open_regular(file).close()  # opening a FIFO by its name would wait for ever
        with safe_open(file, framework=framework) as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} {_diagnose(file, error)}") from error


def _in_folder(folder: Path) -> Path:
    """Return the path of the checkpoint in a folder: with the usual name, or the only one."""
    for usual in (SINGLE, INDEX):
        if (folder / usual).is_file():
            return folder / usual
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = indices or sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        names = listed(file.name for file in files)
        raise WeightsError(f"{folder} holds {len(files)} checkpoints: {names}; give one of them")
    pickled = [file.name for file in sorted(folder.iterdir()) if file.suffix in _PICKLES]
    if pickled:
        raise WeightsError(f"{folder} holds pickles only ({listed(pickled)}); {_CONVERT}")
    gguf = [file.name for file in sorted(folder.glob("*.gguf"))]
    if gguf:
        raise WeightsError(f"{folder} holds GGUF only ({listed(gguf)}); {_FROM_GGUF}")
    raise WeightsError(f"{folder} holds no {SINGLE}, {INDEX} or {CONFIG}; give the file itself")


def _read_index(path: Path) -> dict[str, Path]:
    weight_map = read_json(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map; give the *.safetensors.index.json")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not stays_inside(shard):
            raise WeightsError(
                f"{path} says that {shown(name)} is in {shown(str(shard))!r}, which is not a file "
                "of that folder; download the index again"
            )
    return {name: path.parent / shard for name, shard in weight_map.items()}


def stays_inside(shard: str) -> bool:
    """Return whether the relative path of a shard stays inside the folder of the index."""
    # Links are not followed, since Hugging Face's cache links every file to another folder.
    if not shard.strip() or not shard.isprintable():
        return False
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.anchor or ".." in path.parts:
            return False
    return True


# -- diagnosis of files that are not valid safetensors files ------------------------------------

AGAIN: Final = "download it again"


def _diagnose(file: Path, error: Exception) -> str:
    """Return why the safetensors library cannot read a file, and what to do about it."""
    if file.is_dir():
        return "is a folder; give a .safetensors file"
    try:
        size = file.stat().st_size
        with open_regular(file) as stream:
            start = stream.read(9)
    except FileNotFoundError:
        return "does not exist; check the path"
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    if not size:
        return f"is empty; {AGAIN}"
    if _looks_pickled(start):
        return f"is a pickle or a zip archive, not safetensors; {_CONVERT}"
    return _header_problem(file, size, start) or f"is broken: {one_line(error)}; {AGAIN}"


def _looks_pickled(start: bytes) -> bool:
    # A header of 640 bytes starts with the same two bytes as a pickle, but its brace follows.
    is_header = start[4:8] == bytes(4) and start[8:9] == b"{"
    pickled = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return not is_header and (pickled or start[:4] == b"PK\x03\x04")


def _header_problem(file: Path, size: int, start: bytes) -> str | None:
    """Return the defect of the sizes or the header, or None if they are valid."""
    length = int.from_bytes(start[:8], "little")
    if size < 8 or (length <= LONGEST_HEADER and 8 + length > size and start[8:9] in (b"{", b"")):
        needed = f"its header alone takes {8 + length}" if size >= 8 else "its header takes more"
        return f"is truncated: it has {size} bytes, {needed}; {AGAIN}"
    if length > LONGEST_HEADER or start[8:9] != b"{":
        return (
            "is not a safetensors file: it does not start with a header; give a .safetensors file"
        )
    try:
        first, entries = safetensors_entries(file)
        ends = (int(entry["data_offsets"][1]) for entry in entries.values())
        end = first + max(ends, default=0)
    except (OSError, ValueError):
        return f"has a header that is not JSON; {AGAIN}"
    except (KeyError, TypeError, IndexError, AttributeError):
        return None
    if end > size:
        return f"is truncated: it has {size} bytes, its header describes {end}; {AGAIN}"
    if end < size:
        return f"has {size - end} bytes more than the {end} that its header describes; {AGAIN}"
    return None


# -- names and shapes in messages ---------------------------------------------------------------


_AT_MOST: Final = 6
"""The largest number of items that a message lists; further ones are counted."""
LONGEST: Final = 400
"""The largest number of characters of a name in a message."""


def shown(name: str) -> str:
    """Return a name from a file as printable text on one line."""
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}…"


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """Return the first items joined, followed by the number of further ones."""
    every = [shown(item) for item in items]
    more = f"{separator}and {len(every) - _AT_MOST} more" if len(every) > _AT_MOST else ""
    return separator.join(every[:_AT_MOST]) + more
