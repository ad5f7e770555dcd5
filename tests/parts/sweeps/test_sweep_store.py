"""The store of a sweep keeps every cell that was added, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_export.commands.main import run
from attn_export.errors import OutputError, UsageError
from attn_export.parts.sweeps.store import FILE, Row, Store, merge, to_json


def row(number: int, **fields: object) -> Row:
    usual = {
        "id": f"s{number}/standard/ort-cpu", "source": f"s{number}", "name": f"layer {number}",
        "spec": "{}", "dtype": "float32", "dialect": "standard", "runtime": "ort-cpu",
        "verdict": "passed",
    }  # fmt: skip
    return Row(**{**usual, **fields})


def test_rows_come_back_as_they_were(tmp_path: Path):
    rows = [row(1, worst=0.5, cases=3), row(2, verdict="failed", cause='it\'s "wrong"', wrong=2)]
    with Store.open(tmp_path / "s") as store:
        store.add(rows)
        assert store.rows() == rows
        assert store.counts() == {"ort-cpu": {"failed": 1, "passed": 1}}
        assert json.loads(to_json(store))["cells"][1]["cause"] == 'it\'s "wrong"'


@pytest.mark.parametrize("verdict", ["passed", "failed", "crashed", "refused", "not run", "seen"])
def test_finished_cells_stay(verdict: str, tmp_path: Path):
    with Store.open(tmp_path) as store:
        store.add([row(1, verdict=verdict), row(2, verdict="error"), row(3, verdict="unavailable")])
        assert store.finished() == {row(1).id}


def test_a_store_with_results_is_continued_on_purpose_only(tmp_path: Path):
    with Store.open(tmp_path, new=True) as store:
        store.add([row(1)])
    with (
        pytest.raises(UsageError, match="has 1 finished cells; give --resume"),
        Store.open(tmp_path, new=True),
    ):
        pass
    with Store.open(tmp_path) as store:
        store.add([row(1, verdict="failed")])
        assert [each.verdict for each in store.rows()] == ["failed"]


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path):
    (tmp_path / FILE).write_text("hello")
    with pytest.raises(UsageError, match="is not a store of a sweep"), Store.open(tmp_path):
        pass
    with pytest.raises(UsageError, match="is not a store of a sweep"):
        merge(tmp_path / "new", [tmp_path / "nothing"])
    with (
        pytest.raises(OutputError, match="cannot write /dev/null"),
        Store.open(Path("/dev/null/x")),
    ):
        pass


def test_a_store_of_another_version_is_refused(tmp_path: Path):
    with Store.open(tmp_path) as store:
        store.add([row(1)])
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE facts SET value = '0.0.1' WHERE name = 'version'")
    connection.close()
    with pytest.raises(UsageError, match=r"has version '0.0.1'"), Store.open(tmp_path):
        pass


def test_a_truncated_store_is_one_line(tmp_path: Path):
    with Store.open(tmp_path) as store:
        store.add([row(number) for number in range(200)])
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(OutputError, match="cannot use"), Store.open(tmp_path) as store:
        store.rows()


DOES_NOT_FIT = [
    ("UPDATE cells SET worst = 'x'", "`$.worst`, which is 'x'"),
    ("UPDATE cells SET worst = 9e999", "`$.worst`, which is inf"),
    ("UPDATE cells SET cases = -1", "`$.cases`, which is -1"),
    ("UPDATE cells SET runtime = 5", "`$.runtime`, which is 5"),
    ("UPDATE cells SET runtime = 'ort-cpu==x'", "`$.runtime`, which is 'ort-cpu==x'"),
    ("UPDATE cells SET cause = x'00'", "`$.cause`, which is b'"),
    ("UPDATE cells SET name = 'a' || char(27) || '[31m'", "`$.name`, which is 'a"),
    ("UPDATE cells SET verdict = NULL", "got `null` - at `$.verdict`"),
    ("UPDATE facts SET value = x'00' WHERE name = 'version'", "has version b'"),
    ("DROP TABLE cells; CREATE VIEW cells AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL "
     "SELECT x + 1 FROM c) SELECT x AS id FROM c", "it has the 'view' 'cells'"),
    ("CREATE TRIGGER t AFTER INSERT ON cells BEGIN DELETE FROM facts; END", "the 'trigger' 't'"),
    ("CREATE TABLE more (x)", "the 'table' 'more'"),
    ("ALTER TABLE facts ADD more AS (1)", "the 'table' 'facts'"),
    ("CREATE INDEX i ON cells (name)", "the 'index' 'i'"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "message"), DOES_NOT_FIT)
def test_a_store_of_another_schema_is_one_line(
    statement: str, message: str, tmp_path: Path, capsys
):
    with Store.open(tmp_path / "s") as store:
        store.add([row(1)])
    with contextlib.closing(sqlite3.connect(tmp_path / "s" / FILE)) as connection:
        connection.executescript(statement)
    assert run(["sweep", "--merge", str(tmp_path / "s"), "--output", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", [FILE, f"{FILE}-wal", f"{FILE}-journal"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("none")])
def test_a_store_has_neither_links_nor_fifos(name: str, make: Callable, tmp_path: Path):
    make(tmp_path / name)
    with pytest.raises(UsageError, match="is a link, or no regular file"), Store.open(tmp_path):
        pass
    assert not (tmp_path / "none").exists()


def test_reading_a_store_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Store.open(tmp_path) as store:
        store.add([row(number, cause="x" * 2000) for number in range(50)])
    monkeypatch.setattr("attn_export.parts.sweeps.store.MOST_TEXT", 50_000)
    with pytest.raises(UsageError, match="more than 50000 bytes"), Store.open(tmp_path) as store:
        store.rows()
    monkeypatch.setattr("attn_export.parts.sweeps.store.SECONDS", 0.0)
    monkeypatch.setattr("attn_export.parts.sweeps.store.STEPS", 10)
    with pytest.raises(OutputError, match="it takes longer than 0 s"), Store.open(tmp_path):
        pass


@pytest.mark.parametrize(
    ("last", "code"),
    [("passed", 0), ("failed", 6), ("crashed", 5), ("hung", 5), ("out of memory", 5),
     ("refused", 0)],
)  # fmt: skip
def test_merging_takes_all_cells_and_the_last_of_equal_ones(last: str, code: int, tmp_path: Path):
    for name, rows in (("a", [row(1), row(2)]), ("b", [row(2, verdict=last), row(3)])):
        with Store.open(tmp_path / name) as store:
            store.add(rows)
    stores = [word for name in "ab" for word in ("--merge", str(tmp_path / name))]
    assert run(["sweep", *stores, "--output", str(tmp_path / "all")]) == code
    with Store.open(tmp_path / "all") as store:
        assert [each.verdict for each in store.rows()] == ["passed", last, "passed"]


WRITER = """
import sys
from pathlib import Path
from attn_export.parts.sweeps.store import Row, Store
with Store.open(Path(sys.argv[1])) as store:
    for number in range(int(sys.argv[2]), 100000):
        store.add([Row(id=str(number), source="s", name="n", spec="{}", dtype="", dialect="d",
                       runtime="r", verdict="passed")])
        print(number, flush=True)
"""


def test_a_killed_writer_loses_no_cell_that_was_added(tmp_path: Path):
    start = 0
    for lines in (3, 40, 150):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(lines):
                last = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            last = max([last, *map(int, writer.stdout.read().split())])
        with Store.open(tmp_path) as store:
            found = {int(each.id) for each in store.rows()}
        assert set(range(last + 1)) <= found
        start = max(found) + 1
