"""Plan of a sweep: a TOML file, and the cells that it describes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from attn_export.dialect_names import DIALECTS, check_dialects
from attn_export.errors import SpecError, UsageError
from attn_export.runtimes.catalogue import runtime
from attn_export.schema import GraphName, Name
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import NUMBERS, TYPES
from attn_export.untrusted_files import checked, read_toml

ALL: Final = "all"
SPEC, BUNDLE, MODULE = "spec", "bundle", "module"

DRY_RUN: Final = "dry-run@"
"""Prefix of the name of a dry run of CUDA, which is given like a runtime: ``dry-run@sm_80``."""

NO_DRY_RUNS: Final = "this installation cannot make dry runs of CUDA"
"""What is said where the part that makes them was left out."""

_MOST_CELLS: Final = 200_000
"""Largest number of cells of one sweep, against products of lists that are too large wrongly.
Those that are equal or excluded count too."""

_MOST_CONDITIONS: Final = 1000
"""Largest number of values in all rules that exclude cells."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One layer of a sweep.

    Attributes:
        content: The fields of the spec, or the path of the bundle or ``PATH.py:FUNCTION``.
    """

    kind: str
    content: Mapping[str, Any] | str

    @property
    def key(self) -> str:
        """A digest of the content: 16 hexadecimal digits."""
        text = json.dumps([self.kind, self.content], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """A short name for messages and bundles."""
        if isinstance(self.content, str):
            text = re.sub(r"[^\w.-]+", "-", self.content).strip("-.")[-60:]
            return f"{self.kind}-{text or 'x'}"
        fields = self.content
        heads = "x".join(str(fields[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
        return f"{heads}-{fields['dtype']}-{self.key[:6]}"


def short_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `embed_dim`, `num_heads`, and the fields of a spec that differ from the defaults."""
    required = {name: values[name] for name in ("embed_dim", "num_heads")}
    defaults = AttentionSpec.from_dict(required).to_dict()
    fields = AttentionSpec.from_dict(values).to_dict()
    return required | {name: value for name, value in fields.items() if defaults.get(name) != value}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One result of a sweep: a layer in one dialect and runtime."""

    source: Source
    dialect: str
    runtime: str

    @property
    def id(self) -> str:
        """The key in the store."""
        return f"{self.source.key}/{self.dialect}/{self.runtime}"

    @property
    def dtype(self) -> str:
        """The dtype of a spec, or "" for a bundle or a module."""
        return str(self.source.content["dtype"]) if self.source.kind == SPEC else ""  # type: ignore[index]


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Content of the TOML file. docs/sweep.md explains the fields."""

    name: GraphName = ""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    dialects: list[Name] = msgspec.field(default_factory=lambda: [ALL])
    dtypes: list[Name] = []
    runtimes: Annotated[list[Name], Meta(max_length=1000)] = msgspec.field(
        default_factory=lambda: ["ort-cpu"]
    )
    architectures: list[Name] = []
    base: dict[str, Any] = {}
    spec: list[dict[str, Any]] = []
    bundle: list[Name] = []
    module: list[Name] = []
    exclude: list[dict[str, Any]] = []


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep."""

    name: str
    seed: int
    dialects: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def sources(self) -> list[Source]:
        """The layers, in order."""
        return list({cell.source.key: cell.source for cell in self.cells}.values())

    def share(self, number: int, count: int) -> SweepPlan:
        """Return one of `count` parts of the sweep, which have about as many layers each.

        `number`: The number of the part, from 1. It has the layers `number`, `number + count`, and
        so on.
        """
        keys = {source.key for source in self.sources[number - 1 :: count]}
        cells = tuple(cell for cell in self.cells if cell.source.key in keys)
        return dataclasses.replace(self, cells=cells)


def read_plan(path: Path, *, allow_modules: bool = False) -> SweepPlan:
    """Return the plan of a sweep, read from its file."""
    try:
        file = checked(read_toml(path), _File)
    except OSError as error:
        raise UsageError(f"cannot read the plan {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a plan of a sweep: {error}") from error
    if file.module and not allow_modules:
        raise UsageError(
            f"{path} names the module {file.module[0][:80]!r}, whose code would run on the "
            "workers; give --allow-modules where you trust it"
        )
    try:
        return _plan(path, file)
    except SpecError as error:
        raise UsageError(f"{path}: {error}; change it, or leave it out by [[exclude]]") from error


def _dry_runs(path: Path, architectures: Sequence[str]) -> list[str]:
    """Return the names of dry runs on these architectures, which another part makes."""
    if not architectures:
        return []
    try:
        from attn_export.parts.cuda_dry_run.dry_run_results import architectures_named
    except ModuleNotFoundError as error:
        raise UsageError(f"{path} has architectures; {NO_DRY_RUNS}") from error
    return [f"{DRY_RUN}{card.name}" for card in architectures_named(architectures)]


def _plan(path: Path, file: _File) -> SweepPlan:
    dialects = check_dialects(file.dialects, ALL)
    dialects = DIALECTS if ALL in dialects else dialects
    runtimes = {name: tuple(runtime(name).dialects) for name in file.runtimes}
    runtimes |= dict.fromkeys(_dry_runs(path, file.architectures), DIALECTS)
    pairs = [(name, each) for name, has in runtimes.items() for each in dialects if each in has]
    _check_excludes(path, file.exclude)
    _check_count(path, file, len(pairs))
    cells = [
        cell
        for source in _sources(path, file)
        for cell in (Cell(source, dialect, name) for name, dialect in pairs)
        if not any(_matches(rule, cell) for rule in file.exclude)
    ]
    if not cells:
        raise UsageError(f"{path} has no cells; give [[spec]], bundle or module, and runtimes")
    return SweepPlan(file.name or path.stem, file.seed, dialects, tuple(cells))


def _sources(path: Path, file: _File) -> Iterator[Source]:
    """Yield each layer once, without those that a rule excludes for all runtimes and dialects."""
    seen = set()
    for source in itertools.chain(
        _specs(path, file),
        (Source(BUNDLE, str(path.parent / bundle)) for bundle in file.bundle),
        (Source(MODULE, str(path.parent / module)) for module in file.module),
    ):
        if source.key not in seen:
            seen.add(source.key)
            yield source


def _tables(path: Path, file: _File) -> Iterator[dict[str, list[Any]]]:
    """Yield the values of each field of each table `[[spec]]`."""
    for table in file.spec:
        fields = {**file.base, **({"dtype": file.dtypes} if file.dtypes else {}), **table}
        unknown = [name for name in fields if name not in TYPES]
        if unknown:
            raise UsageError(f"{path}: a spec has no field {unknown[0][:60]!r}")
        yield {name: _values(name, value) for name, value in fields.items()}


def _check_count(path: Path, file: _File, pairs: int) -> None:
    """Raise UsageError if there are too many cells, given the pairs of a runtime and a dialect."""
    specs = sum(math.prod(map(len, fields.values())) for fields in _tables(path, file))
    if (specs + len(file.bundle) + len(file.module)) * max(pairs, 1) > _MOST_CELLS:
        raise UsageError(f"{path} has more than {_MOST_CELLS} cells; split it")


def _specs(path: Path, file: _File) -> Iterator[Source]:
    """Yield a layer for each combination of the values of each table `[[spec]]`."""
    for fields in _tables(path, file):
        for values in itertools.product(*fields.values()):
            spec = dict(zip(fields, values, strict=True))
            if any(_excludes(rule, spec) for rule in file.exclude):
                continue
            yield Source(SPEC, AttentionSpec.from_dict(spec).to_dict())


def _values(name: str, value: Any) -> list[Any]:
    """Return the values of a field: the items of a list, unless the field itself is a list."""
    if not isinstance(value, list):
        return [value]
    if TYPES[name] == NUMBERS and not any(isinstance(item, list) for item in value):
        return [value]
    return value


def _check_excludes(path: Path, rules: Sequence[Mapping[str, Any]]) -> None:
    values = sum(len(v) if isinstance(v, list) else 1 for rule in rules for v in rule.values())
    if max(len(rules), values) > _MOST_CONDITIONS:
        raise UsageError(f"{path}: [[exclude]] has more than {_MOST_CONDITIONS} values; split it")
    known = {"runtime", "dialect", "kind", *TYPES}
    for rule in rules:
        unknown = [name for name in rule if name not in known]
        if unknown or not rule:
            wrong = repr(unknown[0][:60]) if unknown else "nothing"
            raise UsageError(
                f"{path}: [[exclude]] names {wrong}; give runtime, dialect, kind or fields of specs"
            )


def _excludes(rule: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether all conditions of a rule are met. One on a name not in `fields` is not."""
    return all(
        name in fields and fields[name] in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in rule.items()
    )


def _matches(rule: Mapping[str, Any], cell: Cell) -> bool:
    """Return whether a rule excludes a cell, by its runtime, dialect, kind and fields."""
    facts: dict[str, Any] = {
        "runtime": cell.runtime, "dialect": cell.dialect, "kind": cell.source.kind,
    }  # fmt: skip
    if isinstance(cell.source.content, Mapping):
        facts |= cell.source.content
    return _excludes(rule, facts)
