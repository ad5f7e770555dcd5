"""Bundles that several tests need, built once in a run by the first process that needs them."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import onnx
import pytest

from attn_export import Report, build, verify
from attn_export.errors import UsageError
from attn_export.graph.load import load_model
from attn_export.optional_parts import module_of, parts
from attn_export.runtimes.catalogue import required, runtime
from attn_export.spec import AttentionSpec

BUNDLES: dict[str, dict[str, object]] = {
    "append": {
        "num_kv_heads": 1, "attn_mask": "bool[B,1,1,S]", "cache": "append", "attn_weights": True,
    },
    "in-place": {"cache": "in-place", "rotary": "half", "position_ids": True},
    "no-cache": {"attn_mask": "float[B,1,L,S]", "attn_weights": True, "add_bias_kv": True},
    "float16": {"cache": "append", "dtype": "float16", "rotary": "half"},
    "bfloat16": {"cache": "in-place", "dtype": "bfloat16", "rotary": "half"},
}  # fmt: skip
"""Fields of small causal specs, beside E 16 and H 2, for tests of kits and of runtimes."""

T = TypeVar("T")

_folder: list[Path] = []
_settings = {"all": False}


def use(factory: pytest.TempPathFactory, *, all_tests: bool) -> None:
    """Set the folder of shared results, which all processes of a run use.

    conftest.py calls this at the start of each process.
    """
    _settings["all"] = all_tests
    base = factory.getbasetemp()  # below the base of the whole run in processes of pytest-xdist
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    _folder[:] = [folder]


def missing(name: str) -> str | None:
    """Return why a runtime, or a dialect or program of a part, is not here; None if it is."""
    if any(name in part.dialects for part in parts()):
        return None
    try:
        return runtime(name).unavailable()
    except UsageError as error:  # no runtime, or that of a part which is not there
        installer = module_of(name, {n: m for part in parts() for n, m in part.installs.items()})
        return str(error) if installer is None else installer.not_ready(name)


def always() -> list[str]:
    """Return the names of the runtimes that the default tests need, those of parts included."""
    of_parts = [name for part in parts() for name in part.tests_need if name in part.runtimes]
    return [*required(), *of_parts]


def extended(values: Iterable[T], kept: Callable[[T], bool]) -> list[Any]:
    """Return parameters of a test, with the mark `extended` on those that `kept` rejects."""
    marks = pytest.mark.extended
    return [value if kept(value) else pytest.param(value, marks=marks) for value in values]


def once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the shared folder of this name, which the first call in a run makes.

    Tests must copy the folder before they change it.
    """
    folder = _folder[0] / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = Path(f"{folder}.done")
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@functools.cache
def spec_of(name: str) -> AttentionSpec:
    """Return the spec of one of `BUNDLES`."""
    fields = {"embed_dim": 16, "num_heads": 2, "causal": True, **BUNDLES[name]}
    return AttentionSpec.from_dict(fields)


def bundle_of(name: str) -> Path:
    """Return a bundle of one of `BUNDLES` in all dialects."""

    def make(folder: Path) -> None:
        assert build(spec_of(name), folder, name=name, runtimes=["ort-cpu"]).passed

    return once(f"bundles/{name}", make)


def few_bits_bundle() -> Path:
    """Return a bundle with int4 weights in the standard dialect."""
    from conftest import small_spec  # which imports this module

    def make(folder: Path) -> None:
        options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
        assert build(small_spec(weights_dtype="int4"), folder, name="few bits", **options).passed

    return once("quantised/quality", make)


@functools.cache
def few_bits_report() -> Report:
    """Return the report of `verify` of it."""
    return verify(few_bits_bundle(), runtimes=["ort-cpu"])


def passed_bundle(spec: AttentionSpec) -> Path:
    """Return a bundle of a spec in all dialects, called `small`, which is built once."""
    name = hashlib.sha256(spec.to_toml().encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        report = build(spec, folder, name="small", runtimes=["ort-cpu"])
        assert report.passed, str(report)

    return once(f"specs/{name}", make)


def swapped_bundle() -> Path:
    """Return a bundle whose graph for ONNX Runtime takes values as `[B, Hkv, Dv, capacity]`."""
    from conftest import small_spec  # which imports this module

    return passed_bundle(small_spec(cache="in-place", attn_mask="none", rotary="half"))


def report_of(folder: Path) -> dict[str, Any]:
    """Return the report of the build of a bundle."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def judged_graphs(folder: Path) -> set[str]:
    """Return the names of the graphs that passed when a bundle was built; it must have no others.

    The build has judged each graph. With --all, the bundle is judged again as it is on disk.
    """
    report = report_of(folder)
    assert report["passed"]
    if _settings["all"]:
        again = verify(folder, runtimes=["ort-cpu"])
        assert again.passed, str(again)
    graphs = {verdict["graph"] for verdict in report["verdicts"] if verdict["status"] == "passed"}
    assert graphs == {path.name for path in folder.glob("*.onnx")}
    return graphs


def nodes_of(folder: Path, graph: str, op_type: str) -> list[onnx.NodeProto]:
    """Return the nodes of an operator in a graph of a bundle."""
    return [node for node in load_model(folder / graph).graph.node if node.op_type == op_type]


def passed_graphs(report: Report) -> set[str]:
    """Return the names of the graphs with at least one verdict that passed."""
    return {verdict.graph for verdict in report.verdicts if verdict.status == "passed"}
