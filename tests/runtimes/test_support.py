"""New measurements of the runtimes' support tables, in both directions, on every runtime.

So a new version of a runtime that gains or loses something fails here. Outside the default tests,
`ATTN_EXPORT_MORE_RUNTIMES=1` has all runtimes that are here measured, on more subjects.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from subjects import FEW, MORE, SUBJECTS, shared_folder, stored, what_is_wrong

from attn_export.runtimes.catalogue import all_runtimes, required
from attn_export.runtimes.protocol import Runtime, known_limit
from attn_export.schema import GraphFile

Need = Callable[[str], None]

DEFAULT = {*required()} - {"ort-cpu"}
MEASURED = [
    kind for kind in all_runtimes() if kind.name in DEFAULT or (MORE and not kind.unavailable())
]
TRIED = SUBJECTS if MORE else FEW
CONTRIB = (
    "plain",
    "cache, causal",
    "cache, causal, padding, grouped",
    "in place",
    "int4",
    "int8",
    "linear, delta",
)
"""Subjects whose form for ONNX Runtime is tried by default."""

OF_OTHERS = {
    "Cast(FLOAT to FLOAT16) with input FLOAT", "DynamicQuantizeLinear", "MatMulInteger",
    "com.microsoft.MatMulNBits(accuracy_level 4)", "DequantizeLinear(UINT4)", "input INT8",
    "input UINT8",
}  # fmt: skip
"""Rows of which no layer has a graph: of whole models, of others, and of earlier versions."""

MILD = {("opencv", "softcap by 50"), ("mnn", "softcap")}
"""Runtimes and subjects whose numbers do not show what is wrong: tanh far from 0, and near it."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the subjects."""
    return shared_folder(tmp_path_factory)


def forms_for(kind: Runtime, name: str, shared: Path) -> list[GraphFile]:
    """Return the tested forms of a subject."""
    return [
        form
        for form in stored(name, shared).forms
        if form.dialect in kind.dialects
        and (kind.name, name) not in MILD
        and (MORE or form.dialect != "ort" or name in CONTRIB)
    ]


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("kind", MEASURED, ids=lambda kind: kind.name)
@pytest.mark.every(9)
def test_a_runtime_does_what_its_table_says(
    kind: Runtime, name: str, shared: Path, need: Need, tmp_path: Path
):
    need(kind.name)
    for form in forms_for(kind, name, shared):
        said = known_limit(kind, form)
        found = what_is_wrong(kind, stored(name, shared), form, tmp_path / form.name)
        assert bool(said) == bool(found), (
            f"{form.name} of {name}: the table of {kind.name} says {said or 'that it runs'!r}, "
            f"but {found or 'it is right'}; {', '.join(form.features)}"
        )


@pytest.mark.parametrize("kind", MEASURED, ids=lambda kind: kind.name)
def test_every_row_is_the_only_reason_for_some_graph(kind: Runtime, shared: Path):
    features = [set(form.features) for name in TRIED for form in forms_for(kind, name, shared)]
    reasons = [
        [row for row in kind.unsupported if has.issuperset(row.split(" with "))] for has in features
    ]
    alone = {rows[0] for rows in reasons if len(rows) == 1}
    assert set(kind.unsupported) - OF_OTHERS == alone - OF_OTHERS


@pytest.mark.parametrize("kind", MEASURED, ids=lambda kind: kind.name)
def test_the_installed_release_was_measured(kind: Runtime, need: Need):
    need(kind.name)
    assert kind.version() == kind.measured
