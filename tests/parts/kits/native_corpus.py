"""Broken bundles for programs that read golden files: one field wrong at a time, or at random."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx

from attn_export.tensorfile import numpy_dtype
from attn_export.tensorproto import CODES, DTYPES

Change = Callable[[Path], None]

CONTROLS = "\x1b[31mred\x07\r\n\u202e"
HUGE = 2**40
FITTED = 2**20
"""The most bytes of data that are made up for sizes that were made up."""

READ, RAN = 2, 1
"""Exit codes: a file cannot be read; a case was run and is wrong."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """A bundle with one thing wrong.

    Attributes:
        name: The file and what is wrong with it.
        change: Breaks a copy of the bundle.
        codes: The exit codes that a program may end with.
    """

    name: str
    change: Change
    codes: frozenset[int] = frozenset({READ})


def broken_bundles(bundle: Path, case: str) -> Iterator[Broken]:
    """Yield each kind of fault, at one file or another of a case."""
    places = [f"golden/{case}/{path.name}" for path in sorted((bundle / "golden" / case).iterdir())]
    tensors = [place for place in places if "eager" not in place]
    turns = itertools.cycle(tensors)
    for what, edit in TENSORS.items():
        yield _tensor(next(turns), what, edit)
    for what, spoil in FILES.items():
        place = next(turns)
        yield Broken(f"{place}: {what}", _at(place, spoil))
    for what in ("a pipe", "zeros without end", "a folder", "nothing"):
        yield Broken(f"model.onnx: {what}", _at("model.onnx", FILES[what]))


def broken_shapes(bundle: Path, case: str) -> Iterator[Broken]:
    """Yield each tensor of a case in shapes that a replay would cut and join wrongly."""
    folder = bundle / "golden" / case
    tensors = [f"golden/{case}/{p.name}" for p in sorted(folder.iterdir()) if "eager" not in p.name]
    for place, what in itertools.product(tensors, ("another last size", "an axis of 1", "rank 1")):
        yield _tensor(place, what, TENSORS[what])
    for what, value in VALUES.items():
        for place in tensors:
            if "input" in place and _read(bundle / place).data_type == CODES["int64"]:
                change = _at(place, _edited(lambda t, value=value: _fill(t, value)))
                yield Broken(f"{place}: {what}", change, frozenset({READ, RAN}))


def native_inputs(rng: random.Random, bundle: Path, cases: Sequence[str]) -> Iterator[Broken]:
    """Yield bundles broken at random, without end: fields, bytes, and both."""
    codes = frozenset({0, READ, RAN})
    while True:
        folder = bundle / "golden" / rng.choice(cases)
        names = sorted(path.name for path in folder.iterdir() if "eager" not in path.name)
        place = f"golden/{folder.name}/{rng.choice(names)}"
        seed = rng.getrandbits(64)
        what = rng.choice([*TENSORS, "sizes", "bytes", "bytes"])
        if what == "sizes":
            spoil = _edited(lambda t, seed=seed: _draw_sizes(t, random.Random(seed)))
        elif what == "bytes":
            spoil = _spoiled(seed)
        else:
            spoil = _edited(TENSORS[what])
        yield Broken(f"{place}: {what} of seed {seed}", _at(place, spoil), codes)


# -- faults of a tensor: each changes a message --------------------------------------------------

Tensor = onnx.TensorProto
Edit = Callable[[Tensor], None]


def _sizes(change: Callable[[list[int]], list[int]], *, fitted: bool = True) -> Edit:
    """Give a tensor other sizes, with as much data as those ask for or with what it has."""

    def edit(tensor: Tensor) -> None:
        dims = change(list(tensor.dims))
        del tensor.dims[:]
        tensor.dims.extend(dims)
        if fitted:
            _fit(tensor)

    return edit


def _fit(tensor: Tensor) -> None:
    count = 1
    for size in tensor.dims:
        count *= max(size, 0)
    count *= numpy_dtype(DTYPES[tensor.data_type]).itemsize if tensor.data_type in DTYPES else 1
    if count <= FITTED:
        tensor.raw_data = (tensor.raw_data + bytes(count))[:count]


def _typed(code: int, *, fitted: bool = True) -> Edit:
    def edit(tensor: Tensor) -> None:
        same = tensor.data_type == code
        tensor.data_type = CODES["uint8"] if same else code
        if fitted:
            _fit(tensor)

    return edit


def _named(name: str) -> Edit:
    return lambda tensor: setattr(tensor, "name", name)


def _raw(change: Callable[[bytes], bytes]) -> Edit:
    return lambda tensor: setattr(tensor, "raw_data", change(tensor.raw_data) or b"x")


def _fill(tensor: Tensor, value: int) -> None:
    count = len(tensor.raw_data) // 8
    tensor.raw_data = value.to_bytes(8, "little", signed=True) * count


def _draw_sizes(tensor: Tensor, rng: random.Random) -> None:
    sizes = [-1, 0, 1, 2, 3, 7, 16, 255, 2**16, 2**31, 2**32, 2**61, 2**62, 2**63 - 1]
    dims = [rng.choice([*tensor.dims, *sizes]) for _ in range(rng.randrange(10))]
    _sizes(lambda _: dims, fitted=rng.random() < 0.7)(tensor)


TENSORS: dict[str, Edit] = {
    "another last size": _sizes(lambda dims: [*dims[:-1], dims[-1] + 1]),
    "an axis of 1": _sizes(lambda dims: _with_ones(dims)),
    "rank 1": _sizes(lambda dims: [max(dims[-1], 1) + 1]),
    "rank 0": _sizes(lambda _: []),
    "one axis less": _sizes(lambda dims: dims[1:]),
    "one axis more": _sizes(lambda dims: [*dims, 1]),
    "9 axes": _sizes(lambda _: [1] * 9),
    "64 axes": _sizes(lambda _: [1] * 64),
    "no elements": _sizes(lambda dims: [0, *dims[1:]]),
    "huge and empty": _sizes(lambda dims: [2**62, 2**62, 0, *dims][: max(len(dims), 3)]),
    "twice the batch": _sizes(lambda dims: [2 * dims[0], *dims[1:]]),
    "sizes that overflow": _sizes(lambda dims: [2**32] * len(dims), fitted=False),
    "sizes of 2**63 - 1": _sizes(lambda dims: [2**63 - 1] * len(dims), fitted=False),
    "a size of 2**62": _sizes(lambda dims: [2**62, *dims[1:]], fitted=False),
    "a negative size": _sizes(lambda dims: [-1, *dims[1:]], fitted=False),
    "negative sizes": _sizes(lambda dims: [-1 - d for d in dims], fitted=False),
    "too little data": _raw(lambda raw: raw[:-1]),
    "too much data": _raw(lambda raw: raw + b"\0"),
    "one byte of data": _raw(lambda _: b"\0"),
    "no name": _named(""),
    "a long name": _named("n" * 5000),
    "controls in its name": _named(CONTROLS),
    "a name with a zero": _named("query\0x"),
    "a format in its name": _named("%s%n%99999999d"),
    **{f"type {code}": _typed(code) for code in (0, 1, 6, 7, 8, 9, 10, 11, 17, 31, 2**31 - 1)},
    "float64 with its old data": _typed(CODES["float64"], fitted=False),
    "uint8 with its old data": _typed(CODES["uint8"], fitted=False),
}
"""By what is wrong: a change of a tensor after which it is not what the signature says."""


def _with_ones(dims: list[int]) -> list[int]:
    """Make the largest axis 1; where all are 1 already, make one 2."""
    at = max(range(len(dims)), key=dims.__getitem__, default=0)
    return [(1 if dims[at] > 1 else 2) if i == at else d for i, d in enumerate(dims)] or [2]


VALUES = {"-1": -1, "2**31": 2**31, "2**62": 2**62, "-2**63": -(2**63)}
"""Whole numbers that may be lengths, positions or other places."""


# -- faults of a file ----------------------------------------------------------------------------


def _changed(change: Callable[[bytes], bytes]) -> Change:
    def spoil(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return spoil


def _replaced(make: Callable[[Path], object]) -> Change:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def _grown(path: Path) -> None:
    os.truncate(path, HUGE)


FILES: dict[str, Change] = {
    "nothing": lambda path: path.unlink(),
    "an empty file": _changed(lambda _: b""),
    "a pipe": _replaced(os.mkfifo),
    "a folder": _replaced(os.mkdir),
    "zeros without end": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a device": _replaced(lambda path: path.symlink_to("/dev/null")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a file of a terabyte": _grown,
    "cut in its data": _changed(lambda content: content[:-3]),
    "cut in its first field": _changed(lambda content: content[:1]),
    "a number without end": _changed(lambda _: b"\x08" + b"\xff" * 4000),
    "a length beyond the file": _changed(lambda _: b"\x4a\xff\xff\xff\xff\x0f"),
    "a length of 2**63": _changed(lambda _: b"\x4a" + b"\xff" * 8 + b"\x7f"),
    "a group": _changed(lambda content: b"\x0b" + content),
    "many sizes": _changed(lambda content: b"\x0a\x80\x80\x04" + b"\x01" * 65536 + content),
    "a name that is no UTF-8": _changed(lambda content: content + b"\x42\x04\xff\xfe\x9b\x80"),
    "text": _changed(lambda _: b"not a tensor\n" * 99),
}
"""By what is wrong: a change of the file itself."""


def _spoiled(seed: int) -> Change:
    def spoil(path: Path) -> None:
        rng, content = random.Random(seed), bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 1, 2, 5])):
            # The fields before the data are what matters; they take some 40 bytes.
            at = rng.randrange(min(len(content), 48)) if content else 0
            kind = rng.choice(["flip", "set", "cut", "insert", "repeat"])
            if kind == "flip" and content:
                content[at] ^= 1 << rng.randrange(8)
            elif kind == "set" and content:
                content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            elif kind == "cut":
                del content[at : at + rng.choice([1, 2, 8, len(content)])]
            elif kind == "insert":
                content[at:at] = rng.randbytes(rng.choice([1, 2, 9]))
            else:
                content[at:at] = content[: rng.randrange(64)]
        path.write_bytes(bytes(content))

    return spoil


# -- shared --------------------------------------------------------------------------------------


def broken_copy(bundle: Path, folder: Path, broken: Broken) -> Path:
    """Return a copy of a bundle with the fault in it; it replaces the last copy."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bundle, folder)
    broken.change(folder)
    return folder


def _read(path: Path) -> Tensor:
    return Tensor.FromString(path.read_bytes())


def _edited(edit: Edit) -> Change:
    def spoil(path: Path) -> None:
        tensor = _read(path)
        edit(tensor)
        path.write_bytes(tensor.SerializeToString())

    return spoil


def _at(place: str, spoil: Change) -> Change:
    return lambda folder: spoil(folder / place)


def _tensor(place: str, what: str, edit: Edit) -> Broken:
    return Broken(f"{place}: {what}", _at(place, _edited(edit)))
