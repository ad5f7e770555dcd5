"""Graphs that a runtime cannot run: reported before they run, with the dialects that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from conftest import Cli
from shared import bundle_of

from attn_export import verify
from attn_export.errors import UsageError
from attn_export.runtimes.catalogue import all_runtimes, runtimes_of_parts
from attn_export.runtimes.protocol import known_limit
from attn_export.runtimes.run_options import RunOptions
from attn_export.schema import GraphFile


@dataclasses.dataclass(frozen=True)
class Engine:
    """As much of a runtime as preflight asks for."""

    name: str = "some"
    dialects: frozenset[str] = frozenset({"standard", "portable"})
    measured: str = "1.2"
    later: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "Attention with Attention(past)": "no past", "input BFLOAT16": "unknown type 16",
        }
    )  # fmt: skip


STANDARD = GraphFile("model.onnx", features=("Attention", "Attention(past)"))
PORTABLE = GraphFile("model.portable.onnx", "portable", features=("MatMul",))
ORT = GraphFile("model.ort.onnx", "ort", features=("MatMul",))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (PORTABLE, ""),
        (GraphFile("model.onnx", features=("Attention",)), ""),
        (GraphFile("a user's file"), ""),
        (
            STANDARD,
            "some 1.2 does not do Attention with Attention(past): no past; it runs portable",
        ),
        (ORT, "it is not for the ort dialect; it runs portable"),
        (
            GraphFile("model.portable.onnx", "portable", features=("MatMul", "input BFLOAT16")),
            "some 1.2 does not do input BFLOAT16: unknown type 16; it runs portable",
        ),
    ],
)
def test_a_row_of_the_table_concerns_graphs_that_have_all_its_features(form: GraphFile, says: str):
    assert known_limit(Engine(), form, [STANDARD, PORTABLE, ORT]) == says  # type: ignore[arg-type]


def test_another_form_is_named_only_if_it_runs():
    assert known_limit(Engine(), STANDARD, [STANDARD, ORT]).endswith(": no past")  # type: ignore[arg-type]


def test_a_runtime_that_is_named_has_to_run_one_of_the_graphs():
    bundle = bundle_of("append")
    report = verify(bundle, graph=bundle / "model.ort.onnx", runtimes=["onnx-reference"])
    assert report.exit_code == 5
    absent = [run for run in report.runs if run.runtime == "onnx-reference"]
    assert {(run.outcome, run.required) for run in absent} == {("not run", True)}
    assert "not for the ort dialect" in absent[0].reason


def test_one_may_be_left_out_of_all():
    every = {kind.name for kind in all_runtimes()}
    assert {kind.name for kind in RunOptions.of(runtimes=["all"]).runtimes} == every
    without = RunOptions.of(runtimes=["all", "-opencv", "-iree"])
    assert {kind.name for kind in without.runtimes} == every - {"opencv", "iree"}
    assert without.required == {"ort-cpu"}
    with pytest.raises(UsageError, match="unknown runtime 'nothing'"):
        RunOptions.of(runtimes=["all", "-nothing"])


def test_runtimes_are_listed_with_version_device_and_dialects_or_why_not(cli: Cli):
    done = cli("runtimes")
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    further = dict(runtimes_of_parts())
    assert list(lines) == [kind.name for kind in (*all_runtimes(), *further)]
    assert lines["ort-cpu"].endswith("cpu: standard portable ort cuda")
    for kind in all_runtimes():
        reason = kind.unavailable()
        assert (f"unavailable: {reason}" if reason else f"{kind.device}: ") in lines[kind.name]
    for kind, about in further.items():
        reason = kind.unavailable()
        assert lines[kind.name].endswith(f"unavailable: {reason}" if reason else about)


@pytest.mark.parametrize(
    ("text", "mib"), [("8GiB", 8192), ("1.5 GiB", 1536), ("512MiB", 512), ("1GB", 953)]
)
def test_memory_limits_processes_and_slices(text, mib):
    limits = RunOptions.of(memory=text).limits
    assert (limits.memory_mib, limits.slice_bytes) == (mib, mib * 2**20 // 64)
    assert RunOptions.of(memory=text, whole=True).limits.slice_bytes is None


@pytest.mark.parametrize("text", ["", "8", "8 TB", "-1GiB", "255MiB", "1e9GiB", "8GiB\n"])
def test_a_memory_that_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match=r"memory is a size of at least 256MiB, as 8GiB; got"):
        RunOptions.of(memory=text)
