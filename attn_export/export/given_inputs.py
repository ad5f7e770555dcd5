"""The user's own inputs: arrays in files or from functions, prompts as ids or text."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import Interface, add_sums, sizes_text
from attn_export.errors import UsageError, WeightsError, counted, one_line, printable
from attn_export.interface import Shape
from attn_export.results import Case
from attn_export.tensorfile import Array, is_floating, numpy_dtype
from attn_export.untrusted_files import parse_json, read_bytes, read_text
from attn_export.weights.source import listed

OWN = "own_inputs_"
"""The start of the names of cases of the user's own inputs."""

_MOST_BYTES = 2**32
"""The largest size of a user's file of inputs."""

_MOST_PROMPTS = 100
"""The largest number of sets of inputs."""

Prompt = str | list[int]


@dataclasses.dataclass(frozen=True)
class GivenInputs:
    """The user's own inputs from one source.

    Attributes:
        source: The file or function.
        sets: Arrays by name; () if there are prompts.
        prompts: Texts, or lists of token ids.
    """

    source: str
    sets: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[Prompt, ...] = ()


def read_given(source: Any, names: Collection[str], *, takes_prompts: bool) -> GivenInputs:
    """Read a file, or call a function, of a user's inputs.

    `source`: ``FILE.npz``; ``PATH.py:FUNCTION``, which returns arrays by name or several such
        mappings; ``FILE.json`` with token ids or texts; or ``FILE.txt`` with a text on each line.
        From Python also what these hold, or a function that returns it.
    `names`: The names that arrays may have.
    """
    if not isinstance(source, str | Path):
        return _from_python(source, names, takes_prompts=takes_prompts)
    source = str(source)
    kind = Path(source).suffix
    if kind in (".json", ".txt"):
        if not takes_prompts:
            raise UsageError(
                f"--inputs {source}: prompts are for --model; give FILE.npz with arrays by name"
            )
        return GivenInputs(source, prompts=_prompts_in(Path(source)))
    if kind == ".npz":
        found: Any = [_arrays_in(Path(source), list(names))]
    elif Path(source.rpartition(":")[0]).suffix == ".py":
        from attn_export.export.user_module import call_function

        found = call_function(source, "--inputs")
        found = [found] if isinstance(found, Mapping) else found
    else:
        prompts = ", FILE.json, FILE.txt" * takes_prompts
        raise UsageError(f"--inputs is FILE.npz{prompts} or PATH.py:FUNCTION; got {source!r}")
    return GivenInputs(source, _sets(source, found, names))


_PYTHON = "given in Python"


def _from_python(value: Any, names: Collection[str], *, takes_prompts: bool) -> GivenInputs:
    """Return inputs that are no file: arrays by name, or prompts as lists, arrays or tensors."""
    value = value() if callable(value) else value
    found = [value] if isinstance(value, Mapping) else _plain(value)
    if takes_prompts and isinstance(found, Iterable) and not isinstance(found, str):
        found = [_plain(each) for each in itertools.islice(found, _MOST_PROMPTS + 1)]
        if not any(isinstance(each, Mapping) for each in found):
            return GivenInputs(_PYTHON, prompts=_prompts(_PYTHON, found))
    return GivenInputs(_PYTHON, _sets(_PYTHON, found, names))


def _plain(value: Any) -> Any:
    """Return an array or a tensor as lists, and others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _sets(source: str, found: Any, names: Collection[str]) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(found, Iterable) or isinstance(found, str):
        raise UsageError(
            f"--inputs {source} returned {type(found).__name__}; return a mapping of arrays by "
            "name, or several"
        )
    sets = (*itertools.islice(found, _MOST_PROMPTS + 1),)
    _check_count(source, sets)
    for each in sets:
        if not isinstance(each, Mapping):
            raise UsageError(f"--inputs {source} gives {type(each).__name__}, not arrays by name")
        for name in each:
            if name not in names:
                raise UsageError(
                    f"--inputs {source} has {printable(name, 60)}; the inputs are "
                    f"{printable(', '.join(names), 200)}"
                )
    return sets


def _arrays_in(path: Path, names: Sequence[str]) -> Mapping[str, Array]:

    try:
        return _read_npz(path, names, _MOST_BYTES)
    except OSError as error:
        raise UsageError(f"--inputs {path}: {error.strerror or error}") from error
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # a file may hold anything
        raise UsageError(f"--inputs {path} is not a .npz file: {one_line(error)}") from error


def _prompts_in(path: Path) -> tuple[Prompt, ...]:
    try:
        text = read_text(path)
        values = parse_json(text) if path.suffix == ".json" else text.splitlines()
    except OSError as error:
        raise UsageError(f"--inputs {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--inputs {path} cannot be read: {one_line(error)}") from error
    if path.suffix == ".txt":
        values = [line for line in values if line.strip()]
    return _prompts(str(path), values)


def _prompts(source: str, values: Any) -> tuple[Prompt, ...]:
    if isinstance(values, list) and values and all(map(_is_id, values)):
        values = [values]
    if not isinstance(values, list):
        values = []
    _check_count(source, values)
    for number, prompt in enumerate(values, start=1):
        is_ids = isinstance(prompt, list) and prompt and all(map(_is_id, prompt))
        if not is_ids and not (isinstance(prompt, str) and prompt.strip()):
            raise UsageError(
                f"--inputs {source}: prompt {number} is {printable(repr(prompt), 60)}; give lists "
                "of token ids or texts, such as [[1, 2, 3], [4, 5]]"
            )
    return tuple(values)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _check_count(source: str, found: Sequence[Any]) -> None:
    if not 1 <= len(found) <= _MOST_PROMPTS:
        raise UsageError(
            f"--inputs {source} gives {counted(len(found), 'set') if found else 'no set'} of "
            f"inputs; give 1 to {_MOST_PROMPTS}"
        )


def fitting(
    value: Any, name: str, dtype: str, shape: Shape | None, source: str, whose: str
) -> Array:
    """Return an array in the type of an input; raise UsageError if it does not fit.

    `shape`: The sizes of the axes, and names of those that may have any size; None for any shape.
    `whose`: What the inputs are of.
    """
    array, wanted = np.asarray(value), numpy_dtype(dtype)
    fits = shape is None or (
        len(shape) == array.ndim
        and all(
            isinstance(want, str) or want == size
            for want, size in zip(shape, array.shape, strict=True)
        )
    )
    number = array.dtype.kind in "biuf" or is_floating(array.dtype)
    same_kind = is_floating(wanted) or array.dtype.kind in "biu"
    given, shown = f"--inputs {source}: {printable(name, 60)}", printable(list(shape or ()), 100)
    if not (fits and number and same_kind):
        raise UsageError(
            f"{given} is {array.dtype} {list(array.shape)}; {whose} takes {dtype} {shown}"
        )
    if is_floating(array.dtype) and np.isnan(array).any():
        raise UsageError(f"{given} holds NaN; give numbers")
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
    same = np.isfinite(array) == np.isfinite(converted) if is_floating(wanted) else (
        array == converted
    )  # fmt: skip
    if not np.all(same):
        raise UsageError(f"{given} holds a number that {dtype} does not")
    return converted


def solved_sizes(
    arrays: Mapping[str, Array], shapes: Mapping[str, Shape], source: str
) -> dict[str, int]:
    """Return the sizes of axes, of which all arrays must have the same; raise UsageError if not."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        for axis, size in zip(shapes[name], array.shape, strict=True):
            if isinstance(axis, str):
                other, by = sizes.setdefault(axis, (size, name))
                if other != size:
                    raise UsageError(
                        f"--inputs {source}: {printable(axis, 60)} is {other} in "
                        f"{printable(by, 60)} and {size} in {printable(name, 60)}; give one size"
                    )
    return {axis: size for axis, (size, _) in sizes.items()}


def own_cases(
    sources: Sequence[Any], interface: Interface, names: Mapping[str, str], whose: str
) -> list[Case]:
    """Return the cases of a user's own inputs of a module or a graph.

    `names`: The names of inputs in the graph that is judged, which files may have, too.
    `whose`: What the inputs are of.
    """
    meant = {theirs: name for name, theirs in names.items()} | {n: n for n in interface.inputs}
    cases: list[Case] = []
    for given_source in sources:
        read = read_given(given_source, meant, takes_prompts=False)
        source = read.source
        for arrays in read.sets:
            given = {meant[name]: value for name, value in arrays.items()}
            missing = [name for name in interface.inputs if name not in given]
            if missing:
                raise UsageError(
                    f"--inputs {source} lacks {printable(missing[0], 60)}; the inputs of {whose} "
                    f"are {printable(', '.join(interface.inputs), 200)}"
                )
            inputs = {
                name: fitting(given[name], name, each.dtype, each.shape, source, whose)
                for name, each in interface.inputs.items()
            }
            sizes = _checked_sizes(inputs, interface, source, whose)
            cases.append(
                Case(f"{OWN}{len(cases) + 1}", "shape", sizes, inputs, printable(source, 150))
            )
    return cases


def _checked_sizes(
    inputs: Mapping[str, Array], interface: Interface, source: str, whose: str
) -> dict[str, int]:
    """Return the sizes of a set of inputs; refuse what the interface excludes."""
    shapes = {name: each.shape for name, each in interface.inputs.items()}
    found = solved_sizes(inputs, shapes, source)
    for axis, allowed in interface.all_bounds.items():
        if axis in found and found[axis] not in allowed:
            raise UsageError(
                f"--inputs {source}: {printable(axis, 60)} is {found[axis]}; {whose} takes "
                f"{sizes_text(allowed)}"
            )
    free = {axis: size for axis, size in found.items() if axis not in interface.sums}
    sizes = add_sums({**dict.fromkeys(interface.axes, 1), **free}, interface.sums)
    for axis, text in interface.sums.items():
        if found.get(axis, sizes[axis]) != sizes[axis]:
            raise UsageError(
                f"--inputs {source}: {printable(axis, 60)} is {found[axis]}, and "
                f"{printable(text, 80)} is {sizes[axis]}"
            )
    return sizes


# -- named arrays in untrusted .npz files -------------------------------------------------------

_NPY = ".npy"
"""The suffix of an array inside a .npz file."""

_MAX_HEADER = 1024
"""The largest size in bytes of the header of an array in a .npz file; usual headers have 128."""


def _read_npz(path: Path, names: Sequence[str], max_bytes: int) -> dict[str, Array]:
    """Return the arrays of a .npz file, none of which is a pickle.

    `max_bytes`: The largest size of the file, and of each array in it, in bytes.
    """
    with zipfile.ZipFile(io.BytesIO(read_bytes(path, max_bytes))) as archive:
        members = {info.filename.removesuffix(_NPY): info for info in archive.infolist()}
        _check_names(path, members, names)
        arrays = {}
        for name, info in members.items():
            if info.file_size > max_bytes:
                raise WeightsError(
                    f"{path}: {name} takes {info.file_size} bytes, and {max_bytes} is the most"
                )
            with archive.open(info) as stream:
                arrays[name] = _npy(stream.read(max_bytes))
        return arrays


def _npy(data: bytes) -> Array:
    """Read an .npy file; the header is checked before an array is allocated."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array has the version {version} of the format")
    read = (
        np.lib.format.read_array_header_1_0 if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )  # fmt: skip
    shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    content = data[stream.tell() :]
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are no {list(shape)} of {dtype}")
    array = np.frombuffer(content, dtype).astype(dtype.newbyteorder("="))
    return array.reshape(shape, order="F" if is_fortran else "C").copy()


def _check_names(path: Path, arrays: Iterable[str], names: Sequence[str]) -> None:
    """Raise WeightsError if an array has another name."""
    other = [name for name in arrays if name not in names]
    if other:
        raise WeightsError(
            f"{path} holds {counted(len(other), 'array')} of another name: {listed(other)}; it "
            f"may hold {', '.join(names)}"
        )
