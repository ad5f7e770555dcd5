"""ONNX Runtime on emulated processors: each is a runtime of its own, judged as any other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from conftest import Cli
from onnx import TensorProto, helper, numpy_helper
from package_files import FILES
from shared import extended, once

from attn_export import AttentionSpec, build, verify
from attn_export.errors import UsageError
from attn_export.judge.gate import cpu_notes
from attn_export.parts.installing import VARIABLE
from attn_export.parts.other_cpus.emulated_cpu import cpus
from attn_export.results import Case, Golden, Verdict
from attn_export.runtimes.catalogue import runtime, runtimes_of
from attn_export.runtimes.process import run_once
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import Progress, RunOptions

ARM, X86 = "ort-cpu@neoverse-n1", "ort-cpu@haswell"
OLD_X86, NEW_X86 = "ort-cpu@westmere", "ort-cpu@epyc-milan"
NO_HALF, SOME_HALF = "ort-cpu@cortex-a72", "ort-cpu@max"
IN_HALF = "products of float16 in half precision, where others use float32"
LIMITS = Limits(threads=1, seconds=60, memory_mib=None)


def bundle(dtype: str) -> Path:
    def make(folder: Path) -> None:
        spec = AttentionSpec(embed_dim=16, num_heads=2, num_kv_heads=1, causal=True, dtype=dtype)
        assert build(spec, folder, runtimes=["ort-cpu"]).passed

    return once(f"cpus/{dtype}", make)


class CountOfEmulators(Progress):
    """The largest number of emulators that this process had started, seen after each case."""

    most = 0

    def advance(self, text: str) -> None:
        """Count the children."""
        super().advance(text)
        names = map(name_of, psutil.Process().children())
        self.most = max(self.most, sum(name.startswith("qemu-") for name in names))


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return ""


def worst(verdicts: tuple[Verdict, ...], name: str) -> float:
    return max(v.worst for v in verdicts if v.runtime == name and v.worst is not None)


@pytest.mark.parametrize("name", extended([ARM, X86, OLD_X86], lambda name: name == ARM))
def test_every_graph_passes_on_an_emulated_processor(name: str, need):
    need(name)
    counted = CountOfEmulators()
    report = verify(bundle("float32"), runtimes=["ort-cpu", name], progress=counted)
    assert report.passed
    assert counted.most == 2  # the one that is waited for, and the next
    graphs = {v.graph for v in report.verdicts}
    assert {v.graph for v in report.verdicts if v.runtime == name} == graphs
    assert len(graphs) == 3


@pytest.mark.extended
def test_a_graph_passes_on_an_emulated_x86_processor(need):
    need(X86)
    folder = bundle("float32")
    report = verify(folder, graph=folder / "model.portable.onnx", runtimes=[X86])
    assert report.passed
    assert {v.runtime for v in report.verdicts} == {X86}


@pytest.mark.extended
def test_a_processor_that_adds_in_half_precision_is_named_as_less_exact(need):
    need(ARM)
    report = verify(bundle("float16"), runtimes=["ort-cpu", ARM, NO_HALF])
    assert worst(report.verdicts, NO_HALF) == pytest.approx(worst(report.verdicts, "ort-cpu"))
    assert worst(report.verdicts, ARM) > 3 * worst(report.verdicts, "ort-cpu")
    (note,) = (note for note in report.notes if note.startswith("ort-cpu@"))
    assert note.startswith(f"{ARM} has ")
    assert note.endswith(IN_HALF)


def test_a_processor_whose_instructions_are_not_emulated_is_refused(need):
    need(X86)
    reason = runtime("ort-cpu@icelake-server").unavailable()
    assert reason.startswith("the emulator has no avx512f, ")
    every = {each.name for each in runtimes_of("ort-cpu@all")}
    assert "ort-cpu@icelake-server" not in every
    assert {ARM, X86, NO_HALF} <= every


@pytest.mark.parametrize("name", ["pentium", "", "../haswell"])
def test_an_unknown_processor_is_refused_with_the_list(name: str):
    with pytest.raises(UsageError, match=r"unknown CPU .*; .*choose from cortex-a72, .*, all$"):
        runtime(f"ort-cpu@{name}")


def test_a_name_of_several_processors_is_not_one_runtime():
    with pytest.raises(UsageError, match=r"ort-cpu@all stands for \d+ runtimes; name one of them"):
        runtime("ort-cpu@all")


def test_all_processors_are_one_name_for_a_job():
    selected = RunOptions.of(runtimes=["ort-cpu", "ort-cpu@all", X86])
    names = [each.name for each in selected.runtimes]
    assert names == ["ort-cpu", *(each.name for each in runtimes_of("ort-cpu@all"))]
    assert selected.required == set(names)


def test_the_option_cpu_is_short_for_the_name_of_a_runtime(cli: Cli):
    done = cli("verify", bundle("float32"), "--cpu", "pentium")
    assert done.returncode == 2
    assert "unknown CPU 'pentium'; choose from cortex-a72, " in done.stderr


def test_the_core_knows_nothing_of_the_emulator():
    core = [path for file, path in FILES.items() if not file.startswith("parts/")]
    assert [
        path for path in core if re.search("qemu|aarch64|arm64|emulated_cpu", path.read_text())
    ] == []


def test_without_the_emulator_the_reason_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for name in cpus():
        reason = runtime(f"ort-cpu@{name}").unavailable()
        assert reason == "it is not built here; run scripts/setup_runtimes cpus"


def verdict(name: str, share: float) -> Verdict:
    return Verdict(name, "model.onnx", "base", "y", "passed", worst=share)


def golden(dtype: str) -> Golden:
    case = Case("base", "shape", {}, {}, "")
    return Golden(case, {"y": np.zeros(2, dtype)}, {"y": np.zeros(2, dtype)}, {"y": None}, {})


@pytest.mark.parametrize(
    ("shares", "dtype", "said"),
    [
        ({"ort-cpu": 0.1, ARM: 0.29}, "float16", ""),
        ({"ort-cpu": 0.1, ARM: 0.5}, "float16", f"adds all {IN_HALF}"),
        ({"ort-cpu": 0.1, SOME_HALF: 0.5}, "float16", f"adds some {IN_HALF}"),
        ({"ort-cpu": 0.1, ARM: 0.5}, "float32", "against 0.10"),
        ({"ort-cpu": 0.5, ARM: 0.1}, "float16", ""),
        ({"ort-cpu": 0.1, NO_HALF: 0.5}, "float16", "against 0.10"),
        ({NO_HALF: 0.1, ARM: 1.7}, "float16", IN_HALF),
        ({"ort-cpu": 0.0, ARM: 1.0}, "float16", IN_HALF),
        ({"ort-cpu": 0.001, ARM: 0.01}, "float16", ""),  # a few roundings
        ({"ort-cpu": 0.1, "tract": 1.0}, "float16", ""),
    ],
)
def test_a_processor_with_three_times_the_error_of_the_best_is_noted(
    shares: dict[str, float], dtype: str, said: str
):
    notes = cpu_notes([verdict(*pair) for pair in shares.items()], [golden(dtype)])
    assert len(notes) == bool(said)
    assert all(note.endswith(said) for note in notes)


@pytest.mark.parametrize("name", [X86, SOME_HALF])
@pytest.mark.every(2)
def test_products_of_8_bits_have_one_scale_and_whole_sums(name: str, tmp_path: Path, need):
    need(name)
    weights = numpy_helper.from_array(np.full((64, 8), 127, np.int8), "w")
    of_weights = numpy_helper.from_array(np.ones(8, np.float32), "of_weights")
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["y", "w", "zero"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["sum"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["scale", "of_weights"], ["of_both"]),
        helper.make_node("Mul", ["sum", "of_both"], ["product"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", size])
        for name, size in (("x", 64), ("product", 8))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weights, of_weights])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "g.onnx")
    rows = np.array([[1.0], [0.25]], np.float32)
    ran = run_once(runtime(name), tmp_path / "g.onnx", {"two": {"x": rows.repeat(64, 1)}}, LIMITS)
    assert ran.outcome == "ran", ran.complaint
    # In 16 bits, two products of 255 and 127 are 32767; by its own scale, the second row is exact.
    expected = 64 * 127 * np.array([[255], [64]]) / 255
    np.testing.assert_allclose(ran.outputs["two"]["product"], expected.repeat(8, 1), rtol=1e-6)


@pytest.mark.parametrize("name", [X86, SOME_HALF])
@pytest.mark.every(2)
def test_products_with_4_bits_have_a_scale_for_each_block(name: str, tmp_path: Path, need):
    need(name)
    ones = numpy_helper.from_array(np.full((8, 2, 16), 0x99, np.uint8), "w")  # 9 - 8, twice a byte
    of_weights = numpy_helper.from_array(np.ones((8, 2), np.float32), "of_weights")
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "of_weights"], ["product"], domain="com.microsoft", K=64, N=8,
        bits=4, block_size=32, accuracy_level=4,
    )  # fmt: skip
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", size])
        for name, size in (("x", 64), ("product", 8))
    ]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [ones, of_weights])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "g.onnx")
    row = np.full((1, 64), 100.3, np.float32)
    row[0, 32:] = np.float32(0.3)
    row[0, 0], row[0, 32] = 127, 1
    ran = run_once(runtime(name), tmp_path / "g.onnx", {"one": {"x": row}}, LIMITS)
    assert ran.outcome == "ran", ran.complaint
    # By blocks 100.3 is 100, and 0.3 is 38 / 127; by one scale for the row, 0.3 is 0 or 0.5.
    expected = 127 + 31 * 100 + 1 + 31 * 38 / 127
    np.testing.assert_allclose(ran.outputs["one"]["product"], expected, rtol=1e-6)
