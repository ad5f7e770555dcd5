"""Which values of a graph are blamed, the graph that is written, and how it is judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from range_graphs import CASES, FITTING, RangeCase

from attn_export.parts.value_ranges.float_formats import FORMATS, FloatFormat
from attn_export.parts.value_ranges.lockstep import Lockstep, RoundedRun
from attn_export.parts.value_ranges.range_flow import InputSets, ranges_of
from attn_export.parts.value_ranges.range_result import RangeResult
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.tensorfile import ArrayDict, numpy_dtype


def ranges(case: RangeCase, tmp_path: Path, fix: str = "") -> RangeResult:
    path = case.write(tmp_path / "model.onnx")
    sets = InputSets([case.inputs(seed) for seed in range(2)], "drawn")
    return ranges_of(path, sets, (), "float16", tmp_path / fix if fix else None)


def in_float16(model: onnx.ModelProto, inputs: ArrayDict, kept: set[str]) -> np.ndarray:
    """Return the output of a graph, node by node in ONNX's evaluator, rounded to float16."""
    from onnx.reference import ReferenceEvaluator

    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer} | inputs
    narrow: dict[str, np.ndarray] = {n: _rounded(x) for n, x in values.items()}
    for node in model.graph.node:
        given = {name: (values if node.name in kept else narrow)[name] for name in node.input}
        infos = [onnx.ValueInfoProto(name=name) for name in (*node.input, *node.output)]
        graph = onnx.helper.make_graph([node], "node", infos[:-1], infos[-1:])
        alone = onnx.helper.make_model(graph, opset_imports=model.opset_import)
        with np.errstate(all="ignore"):
            (output,) = ReferenceEvaluator(alone).run(None, given)
        narrow[node.output[0]] = _rounded(np.asarray(output))
        values[node.output[0]] = output if node.name in kept else narrow[node.output[0]]
    return values[model.graph.output[0].name]


def _rounded(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32) if x.dtype == np.float32 else x


@pytest.mark.parametrize("name", CASES)
def test_the_value_that_leaves_float16_is_blamed(name: str, tmp_path: Path):
    case = CASES[name]
    result = ranges(case, tmp_path)
    findings = result.analysis.findings
    assert not result.analysis.fits
    assert {f.facts.node or f.facts.name for f in findings} <= set(case.blamed)
    assert case.kind in {finding.kind for finding in findings}
    assert any(finding.absorbed for finding in findings) == case.absorbed


def test_whole_numbers_are_called_so(tmp_path: Path):
    analysis = ranges(CASES["whole numbers that are no numbers of float16"], tmp_path).analysis
    coarse = {finding.facts.name: finding.facts.coarse for finding in analysis.findings}
    assert coarse == {"count": True, "angle": False}


@pytest.mark.parametrize("name", FITTING)
def test_nothing_is_blamed_in_a_graph_that_fits(name: str, tmp_path: Path):
    result = ranges(FITTING[name], tmp_path)
    assert result.analysis.fits
    assert result.analysis.tried == []


@pytest.mark.parametrize("name", CASES)
def test_the_written_graph_keeps_what_it_needs_and_no_more(name: str, tmp_path: Path):
    case = CASES[name]
    fix = ranges(case, tmp_path, "fixed.onnx").fix
    assert fix is not None
    assert (list(fix.nodes), list(fix.clipped)) == (list(case.kept), list(case.clipped))
    assert (fix.passed, fix.judged) == (2, 2)
    model, inputs = case.model(), case.inputs()
    reference = StreamedGraph(tmp_path / "model.onnx")
    lockstep = Lockstep(reference, FORMATS["float16"])
    (expected,) = lockstep.run(inputs, [lockstep.wide()])
    wanted = expected[case.nodes[-1][2]]

    def error(kept: set[str]) -> float:
        found = in_float16(model, inputs, kept).astype(np.float64)
        difference = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        return float(difference) if np.isfinite(found).all() else np.inf

    if not case.clipped:
        assert fix.beside.startswith("passes")
        assert error(set(fix.nodes)) < 0.01
        assert all(error(set(fix.nodes) - {node}) > 0.004 for node in fix.nodes)


def test_a_search_ends_and_says_that_fewer_nodes_may_do(tmp_path: Path):
    nodes = [("Identity", "x", "out0")]
    for n in range(30):
        nodes += [
            ("MatMul", f"out{n} w", f"y{n}"), ("Pow", f"y{n} two", f"squares{n}"),
            ("ReduceMean", f"squares{n} axis", f"mean{n}"), ("Sqrt", f"mean{n}", f"root{n}"),
            ("Div", f"y{n} root{n}", f"z{n}"), ("Add", f"z{n} out{n}", f"out{n + 1}"),
        ]  # fmt: skip
    fix = ranges(RangeCase(nodes, {"two": 2.0}, scale=600.0), tmp_path, "fixed.onnx").fix
    assert fix is not None
    assert (fix.passed, fix.is_least) == (fix.judged, False)


def test_the_written_graph_runs_with_its_inputs_and_outputs_in_float32(tmp_path: Path):
    case = CASES["squares of a norm, absorbed"]
    ranges(case, tmp_path, "fixed.onnx")
    model = onnx.load(tmp_path / "fixed.onnx")
    onnx.checker.check_model(model, full_check=True)
    types = {t.name: t.data_type for t in model.graph.initializer}
    assert types["w"] == onnx.TensorProto.FLOAT16
    assert types["eps"] == onnx.TensorProto.FLOAT
    session = onnxruntime.InferenceSession(tmp_path / "fixed.onnx")
    (output,) = session.run(None, case.inputs())
    assert output.dtype == np.float32


def test_runs_beside_each_other_give_what_they_give_alone(tmp_path: Path):
    case = CASES["softmax without its largest score"]
    graph = StreamedGraph(case.write(tmp_path / "model.onnx"))
    format_ = FORMATS["float16"]
    lockstep = Lockstep(graph, format_)
    free = RoundedRun("free")
    runs = [free, RoundedRun(base=free), RoundedRun(kept={2, 3, 4}, base=free)]
    together = lockstep.run(case.inputs(), runs)
    for run, found in zip(runs, together, strict=True):
        (alone,) = lockstep.run(case.inputs(), [RoundedRun(run.rounding, run.kept)])
        np.testing.assert_array_equal(found["out"], alone["out"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_rounds_and_limits_as_its_dtype(name: str):
    format_ = FORMATS[name]
    largest, least = format_.largest, format_.smallest
    inside = np.array([1.0, 1 + format_.eps / 2, -1 - format_.eps * 0.75, largest, least])
    assert format_.without_limits(inside, full := format_.rounded(inside)) is full
    with np.errstate(over="ignore"):
        beyond = np.array([2 * largest, -largest * (1 + format_.eps / 2), 0.0, 1.0])
        tiny = np.array([least / 3, least * format_.eps / 4, 0.0, least])
        assert format_.overflows(beyond).tolist() == [True, True, False, False]
        assert np.isinf(format_.rounded(beyond)[:2]).all()
        free = format_.without_limits(beyond, format_.rounded(beyond))
    np.testing.assert_allclose(free, beyond, rtol=format_.eps)
    assert format_.subnormal(tiny).tolist() == [True, True, False, False]
    assert format_.flushed(tiny).tolist() == [False, True, False, False]
    row = tiny[:1]
    free = format_.without_limits(row, format_.rounded(row))
    np.testing.assert_allclose(free, row, rtol=format_.eps)
    beside = np.array([1.0, least / 3])  # such a row loses nothing
    assert format_.without_limits(beside, kept := format_.rounded(beside)) is kept


@pytest.mark.parametrize("name", [*FORMATS, "float32"])
@pytest.mark.parametrize("size", [7, 10_000])
def test_a_format_rounds_to_the_bits_of_its_dtype(name: str, size: int):
    format_, rng = FloatFormat.of(name), np.random.default_rng(0)
    for low, high in ((0, 3), (-50, 50), (-9, -3), (4, 6)):
        x = rng.standard_normal(size) * 10.0 ** rng.uniform(low, high, size)
        x[:7] = [0.0, -0.0, np.inf, -np.inf, np.nan, format_.largest * (1 + format_.eps), 2049.0]
        with np.errstate(over="ignore"):
            wanted = x.astype(numpy_dtype(name)).astype(np.float64)
        np.testing.assert_array_equal(format_.rounded(x).view(np.int64), wanted.view(np.int64))
