"""Hostile plans and stores of sweeps: a value, tables, bytes or files are damaged."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from hostile.bundles import Random, damaged, displace, maker, pick
from hostile.surfaces import SPEC, write_toml
from hostile.values import HOSTILE

from attn_export.parts.sweeps.store import FILE, FORMAT, Row, Store

ROW = Row(
    id="a/standard/ort-cpu", source="a", name="n", spec=json.dumps(SPEC), dtype="float32",
    dialect="standard", runtime="ort-cpu==1.27.0", verdict="passed", worst=0.5, cases=3,
)  # fmt: skip
STATEMENTS = (
    "DROP TABLE cells", "DROP TABLE facts", "DELETE FROM facts", "CREATE TABLE more (x)",
    "CREATE VIEW v AS SELECT 1", "CREATE INDEX i ON cells (name)",
    "ALTER TABLE cells ADD COLUMN more", "ALTER TABLE facts DROP COLUMN value",
    "CREATE TRIGGER t AFTER INSERT ON cells BEGIN DELETE FROM cells; END",
    "DROP TABLE cells; CREATE VIEW cells AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 "
    "FROM c) SELECT x AS id FROM c",
    "DROP TABLE facts; CREATE VIEW facts AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 "
    "FROM c) SELECT x AS name, x AS value FROM c",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = 'CREATE VIEW x AS SELECT 1'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET rootpage = 1",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = replace(sql, 'id', 'id AS (1)')",
    "PRAGMA page_size=512; VACUUM", "PRAGMA encoding='UTF-16'", "PRAGMA user_version=7",
)  # fmt: skip


PLAN: dict[str, Any] = {
    "name": "x", "seed": 1, "dialects": ["standard"], "dtypes": ["float32"],
    "runtimes": ["ort-cpu", "tract"], "architectures": ["sm_80"], "base": {"embed_dim": 16},
    "spec": [{"num_heads": [1, 2], "causal": True}], "bundle": ["b"], "exclude": [{"num_heads": 1}],
}  # fmt: skip


@maker
def plan(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of the plan of a sweep."""
    del bundle
    place.mkdir()
    write_toml(place / "p.toml", PLAN, random)
    return ["sweep", str(place / "p.toml"), "--matrix", "github", "--quiet"]


@maker
def store(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage the store of a sweep: a value, its tables, its bytes or its files."""
    del bundle
    place.mkdir()
    folder = place / "s"
    with Store.open(folder) as opened:
        opened.add([ROW])
    file = folder / FILE
    kind = random.integers(1, 6)
    if kind == 3:
        content = file.read_bytes()
        file.write_bytes(damaged(content, random))
    elif kind == 4:
        displace(folder / f"{FILE}{pick(random, ['', '-wal', '-shm', '-journal'])}", random)
    else:
        # A change that SQLite refuses is none.
        with (
            contextlib.closing(sqlite3.connect(file)) as connection,
            contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError),
        ):
            if kind == 1:
                connection.executescript(pick(random, STATEMENTS))
            else:
                values = (*HOSTILE, b"x", "a'b", "$(touch x)", "`id`", "x==y", "--help", FORMAT)
                value = pick(random, [each for each in values if not isinstance(each, list | dict)])
                table, column = pick(
                    random,
                    [("cells", name) for name in ROW.__dataclass_fields__] + [("facts", "value")],
                )
                connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
            connection.commit()
    return ["sweep", "--merge", str(folder), "--output", str(place / "o"), "--json", "-"]
