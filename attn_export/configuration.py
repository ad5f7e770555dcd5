"""The table `[tool.attn-export]` of pyproject.toml, which options of commands and tests replace."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from attn_export.errors import UsageError, one_line
from attn_export.schema import ToolTable
from attn_export.untrusted_files import checked, read_toml

FILE = "pyproject.toml"
TABLE = "tool.attn-export"


def read_configuration(folder: Path) -> ToolTable:
    """Return the table of the nearest pyproject.toml, in a folder or above it.

    The path of its baseline is absolute.
    """
    folder = folder.absolute()
    path = next((p for at in (folder, *folder.parents) if (p := at / FILE).is_file()), None)
    if path is None:
        return ToolTable()
    try:
        tools = read_toml(path).get("tool", {})
        given = tools.get("attn-export", {}) if isinstance(tools, dict) else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from error
    try:
        table = checked(given, ToolTable)
    except ValueError as error:
        raise UsageError(f"[{TABLE}] of {path}: {error}") from error
    return replace(table, baseline=str(path.parent / table.baseline)) if table.baseline else table
