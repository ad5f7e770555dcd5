"""Results of a sweep in one SQLite file, which keeps every finished cell if the process is killed.

The file is in WAL mode, in which a transaction is complete or absent
(https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from attn_export.errors import OutputError, UsageError, one_line
from attn_export.system_info import versions
from attn_export.untrusted_files import read_text

FILE: Final = "cells.sqlite"
"""The name of the file in the folder of a store."""

FORMAT: Final = "attn-export-sweep/1"

SQLITE: Final = b"SQLite format 3\0"
"""The first bytes of every SQLite file."""

AGAIN: Final = ("error", "unavailable")
"""Verdicts of cells that a resumed sweep runs again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One finished cell.

    Attributes:
        id: The key of the cell, `Cell.id`.
        source: The key of the layer, `Source.key`.
        name: The name of the layer.
        spec: The fields of the layer's spec as JSON, or the path of a bundle or module.
        dtype: The dtype of the layer, or "".
        dialect: The dialect.
        runtime: The runtime.
        version: The version of the runtime.
        verdict: ``"passed"``, ``"failed"``, ``"not run"``, ``"crashed"``, ``"refused"``,
            ``"unavailable"``, ``"error"``, or ``"seen"`` for a dry run.
        worst: The largest error, divided by the error allowed.
        cases: The number of cases.
        wrong: The number of cases that did not pass.
        smallest: The smallest case that did not pass.
        cause: The cause of wrong numbers, or the reason that the cell did not run.
        seconds: The time of the cell in seconds. The time to build and run the layer is divided
            equally among its dialects.
    """

    id: str
    source: str
    name: str
    spec: str
    dtype: str
    dialect: str
    runtime: str
    version: str = ""
    verdict: str
    worst: float | None = None
    cases: int = 0
    wrong: int = 0
    smallest: str = ""
    cause: str = ""
    seconds: float = 0.0


COLUMNS: Final = tuple(field.name for field in dataclasses.fields(Row))
_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells ({", ".join(COLUMNS)}, PRIMARY KEY (id));
"""


class Store:
    """The results of a sweep; `open` yields a store."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, *, new: bool = False) -> Iterator[Store]:
        """Yield an existing store, or a new one; close it at the end of the block.

        Args:
            folder: The folder of the store, which is created if it is missing.
            new: Whether the store must have no results yet.

        Raises:
            UsageError: If `new` is set and there are results, if another version of attn-export
                wrote the store, or if the file is not a store.
            OutputError: If the file cannot be written.
        """
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size and _start(path) != SQLITE:
                raise UsageError(f"{path} is not a store of a sweep; choose another --output")
            connection = sqlite3.connect(path, isolation_level="IMMEDIATE")
        except (OSError, sqlite3.Error) as error:
            raise OutputError(f"cannot write {path}: {one_line(error)}") from error
        try:
            store = cls(folder, connection)
            store._prepare(new=new)
            yield store
        except sqlite3.Error as error:
            raise OutputError(f"cannot use {path}: {one_line(error)}") from error
        finally:
            connection.close()

    def _prepare(self, *, new: bool) -> None:
        path, connection = self.folder / FILE, self._connection
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA busy_timeout=30000")
        connection.executescript(_SCHEMA)
        facts = dict(connection.execute("SELECT name, value FROM facts"))
        ours = {"format": FORMAT, "version": versions()["attn-export"]}
        for name, value in ours.items():
            if facts.setdefault(name, value) != value:
                raise UsageError(
                    f"{path} has {name} {facts[name][:40]!r} and this is {value!r}; choose another "
                    "--output"
                )
        with connection:
            connection.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", ours.items())
        count = connection.execute("SELECT count(*) FROM cells").fetchone()[0]
        if new and count:
            raise UsageError(
                f"{path} has {count} finished cells; give --resume to run the rest, or choose "
                "another --output"
            )

    def add(self, rows: Iterable[Row]) -> None:
        """Add finished cells, replacing those with the same key."""
        marks = ", ".join("?" * len(COLUMNS))
        with self._connection:
            self._connection.executemany(
                f"INSERT OR REPLACE INTO cells VALUES ({marks})",
                [dataclasses.astuple(row) for row in rows],
            )

    def finished(self) -> set[str]:
        """Return the keys of the cells that a resumed sweep does not run again."""
        marks = ", ".join("?" * len(AGAIN))
        cursor = self._connection.execute(
            f"SELECT id FROM cells WHERE verdict NOT IN ({marks})", AGAIN
        )
        return {row[0] for row in cursor}

    def rows(self) -> list[Row]:
        """Return all cells, sorted by layer, runtime and dialect."""
        cursor = self._connection.execute(
            f"SELECT {', '.join(COLUMNS)} FROM cells ORDER BY name, source, runtime, dialect"
        )
        return [Row(**dict(zip(COLUMNS, values, strict=True))) for values in cursor]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of cells by runtime and verdict."""
        counted: dict[str, dict[str, int]] = {}
        for name, verdict, count in self._connection.execute(
            "SELECT runtime, verdict, count(*) FROM cells GROUP BY runtime, verdict ORDER BY 1, 2"
        ):
            counted.setdefault(name, {})[verdict] = count
        return counted


def merge(folder: Path, others: Iterable[Path]) -> int:
    """Add the cells of other stores to a store.

    Args:
        folder: The folder of the store to write.
        others: The folders of the stores to read. If several have the same cell, the last counts.

    Returns:
        The number of cells that the store then has.

    Raises:
        UsageError: If a folder has no store.
    """
    rows: list[Row] = []
    for other in others:
        if not (other / FILE).is_file():
            raise UsageError(f"{other} is not a store of a sweep: it has no {FILE}")
        with Store.open(other) as store:
            rows += store.rows()
    with Store.open(folder) as store:
        store.add(rows)
        return len(store.rows())


def to_json(store: Store) -> str:
    """Return all cells as JSON text."""
    rows = [dataclasses.asdict(row) for row in store.rows()]
    return json.dumps({"format": FORMAT, "cells": rows}, indent=1, allow_nan=False) + "\n"


class _Json(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    cells: list[Row]


def read_json(path: Path) -> list[Row]:
    """Return cells that `to_json` wrote, read from a file.

    Raises:
        UsageError: If it cannot be read, or has another format.
    """
    try:
        file = msgspec.json.decode(read_text(path), type=_Json)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} has no cells of a sweep: {one_line(error)[:200]}") from error
    if file.format != FORMAT:
        raise UsageError(f"{path} has the format {file.format[:40]!r} and this reads {FORMAT!r}")
    return file.cells


def _start(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(len(SQLITE))
