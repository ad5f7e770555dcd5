"""Results of a sweep in one SQLite file, which keeps every finished cell if the process is killed.

The file is in WAL mode, in which a transaction is complete or absent
(https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from attn_export.errors import OutputError, UsageError, one_line
from attn_export.schema import Count, LongText, Name, RuntimeName, Text
from attn_export.system_info import versions
from attn_export.untrusted_files import checked, open_regular, shortened

FILE: Final = "cells.sqlite"
"""The name of the file in the folder of a store."""

_BESIDE: Final = ("", "-wal", "-shm", "-journal")
"""The endings of the names of all files that SQLite opens for a database."""

FORMAT: Final = "attn-export-sweep/1"

_SQLITE: Final = b"SQLite format 3\0"
"""The first bytes of every SQLite file."""

AGAIN: Final = ("error", "unavailable")
"""Verdicts of cells that a resumed sweep runs again."""

SECONDS: Final = 60.0
"""The time after which a query is stopped. Reading the cells of the largest sweep takes 5 s."""

STEPS: Final = 100_000
"""The number of steps of SQLite's virtual machine between two looks at the clock."""

MOST_VALUE, MOST_TEXT = 2**20, 2**29
"""The largest size of a value, and of all texts that are read, in bytes. A broken file may hold one
text in many rows."""

_Figure = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One finished cell.

    Attributes:
        spec: The fields of the layer's spec as JSON, or the path of a bundle or module.
        verdict: ``"passed"``, ``"failed"``, ``"unavailable"``, ``"error"``, ``"seen"`` for a dry
            run, or an `Outcome` other than ``"ran"``.
        worst: The largest error, divided by the tolerance.
        seconds: The time of the cell in seconds. The time to build and run the layer is divided
            equally among its dialects.
    """

    id: Name
    source: Name
    name: Name
    spec: LongText
    dtype: Text
    dialect: Name
    runtime: RuntimeName
    version: Text = ""
    verdict: Name
    worst: _Figure | None = None
    cases: Count = 0
    wrong: Count = 0
    smallest: Text = ""
    cause: Text = ""
    seconds: _Figure = 0.0


COLUMNS: Final = tuple(field.name for field in dataclasses.fields(Row))
TABLES: Final = {"facts": ("name", "value"), "cells": COLUMNS}
_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells ({", ".join(COLUMNS)}, PRIMARY KEY (id));
"""


class Store:
    """The results of a sweep; `open` yields a store."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection, self._until = connection, 0.0
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
        connection.set_progress_handler(lambda: time.monotonic() > self._until, STEPS)

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, *, new: bool = False) -> Iterator[Store]:
        """Yield an existing store, or a new one; close it at the end of the block."""
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_files(path)
            connection = sqlite3.connect(path, isolation_level="IMMEDIATE")
        except (OSError, sqlite3.Error) as error:
            raise OutputError(f"cannot write {path}: {one_line(error)}") from error
        try:
            store = cls(folder, connection)
            store._prepare(new=new)
            yield store
        except sqlite3.Error as error:
            is_late = getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT"
            why = f"it takes longer than {SECONDS:.0f} s to read" if is_late else one_line(error)
            raise OutputError(f"cannot use {path}: {why}") from error
        finally:
            connection.close()

    def _read(self, query: str) -> Iterator[Sequence[Any]]:
        """Yield the rows of a query; `SECONDS` and `MOST_TEXT` limit them together."""
        self._until, size = time.monotonic() + SECONDS, 0
        for values in self._connection.execute(query):
            size += sum(len(value) for value in values if isinstance(value, str | bytes))
            if size > MOST_TEXT:
                raise UsageError(f"{self.folder / FILE} has more than {MOST_TEXT} bytes of texts")
            yield values

    def _prepare(self, *, new: bool) -> None:
        path, connection = self.folder / FILE, self._connection
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        self._check_tables()
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA busy_timeout=30000")
        connection.executescript(_SCHEMA)
        facts: dict[str, Any] = dict(map(tuple, self._read("SELECT name, value FROM facts")))
        ours = {"format": FORMAT, "version": versions()["attn-export"]}
        for name, value in ours.items():
            if facts.setdefault(name, value) != value:
                raise UsageError(
                    f"{path} has {name} {shortened(facts[name])} and this is {value!r}; choose "
                    "another --output"
                )
        with connection:
            connection.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", ours.items())
        ((count,),) = self._read("SELECT count(*) FROM cells")
        if new and count:
            raise UsageError(
                f"{path} has {count} finished cells; give --resume to run the rest, or choose "
                "another --output"
            )

    def _check_tables(self) -> None:
        """Raise UsageError if there are other tables, or views, triggers or indices."""
        for kind, name, sql in list(self._read("SELECT type, name, sql FROM sqlite_master")):
            # A view of that name could have rows without end, and a trigger could change others.
            is_fine = kind == "index" and sql is None  # of a primary key
            if kind == "table" and name in TABLES and str(sql).startswith("CREATE TABLE "):
                columns = self._read(f"SELECT name, hidden FROM pragma_table_xinfo('{name}')")
                is_fine = list(columns) == [(column, 0) for column in TABLES[name]]
            if not is_fine:
                raise UsageError(
                    f"{self.folder / FILE} is not a store of a sweep: it has the {shortened(kind)} "
                    f"{shortened(name)}; give another folder"
                )

    def add(self, rows: Iterable[Row]) -> None:
        """Add finished cells, replacing those with the same key."""
        self._until = time.monotonic() + SECONDS
        marks = ", ".join("?" * len(COLUMNS))
        with self._connection:
            self._connection.executemany(
                f"INSERT OR REPLACE INTO cells VALUES ({marks})",
                [dataclasses.astuple(row) for row in rows],
            )

    def finished(self) -> set[str]:
        """Return the keys of the cells that a resumed sweep does not run again."""
        return {row.id for row in self.rows() if row.verdict not in AGAIN}

    def rows(self) -> list[Row]:
        """Return all cells, sorted by layer, runtime and dialect."""
        query = f"SELECT {', '.join(COLUMNS)} FROM cells ORDER BY name, source, runtime, dialect"
        try:
            return [checked(dict(zip(COLUMNS, row, strict=True)), Row) for row in self._read(query)]
        except ValueError as error:
            raise UsageError(f"{self.folder / FILE} has a wrong cell: {error}") from error

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of cells by runtime and verdict."""
        counted: dict[str, dict[str, int]] = {}
        pairs = Counter((row.runtime, row.verdict) for row in self.rows())
        for (name, verdict), count in sorted(pairs.items()):
            counted.setdefault(name, {})[verdict] = count
        return counted


def merge(folder: Path, others: Iterable[Path]) -> None:
    """Add the cells of other stores to a store."""
    rows: list[Row] = []
    for other in others:
        if not (other / FILE).is_file():
            raise UsageError(f"{other} is not a store of a sweep: it has no {FILE}")
        with Store.open(other) as store:
            rows += store.rows()
    with Store.open(folder) as store:
        store.add(rows)


def to_json(store: Store) -> str:
    """Return all cells as JSON text."""
    rows = [dataclasses.asdict(row) for row in store.rows()]
    return json.dumps({"format": FORMAT, "cells": rows}, indent=1, allow_nan=False) + "\n"


def _check_files(path: Path) -> None:
    """Raise UsageError if a file that SQLite would open is a link, FIFO, or no database."""
    for ending in _BESIDE:
        file = path.with_name(path.name + ending)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(file.lstat().st_mode):
                raise UsageError(f"{file} is a link, or no regular file; choose another --output")
    with contextlib.suppress(FileNotFoundError), open_regular(path) as stream:
        if stream.read(len(_SQLITE)) not in (b"", _SQLITE):
            raise UsageError(f"{path} is not a store of a sweep; choose another --output")
