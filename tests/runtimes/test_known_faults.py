"""Wrong outputs of runtimes without an error, each with and without the option that avoids it.

That a fault is still there is shown by a test that is expected to fail: when a runtime corrects it,
that test passes, which pytest reports, and what avoids the fault can go.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from processes import worker_after
from subjects import MORE, shared_folder, stored, what_is_wrong

from attn_export.runtimes import process
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import known_limit

Need = Callable[[str], None]
Measured = Callable[[str, str, str], str]

CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
BFLOAT16 = "avx512_bf16" in CPU or "amx_bf16" in CPU

more = pytest.mark.skipif(not MORE, reason="outside the default tests: ATTN_EXPORT_MORE_RUNTIMES=1")


def fault(reason: str) -> pytest.MarkDecorator:
    """Mark an expected failure: the runtime is wrong, rather than unable to run."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


in_bfloat16 = pytest.mark.skipif(not BFLOAT16, reason="this processor has no bfloat16")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the subjects."""
    return shared_folder(tmp_path_factory)


@pytest.fixture
def measured(shared: Path, tmp_path: Path, need: Need) -> Measured:
    """Return a function that reports a runtime's errors on a dialect of a subject, or ""."""

    def measure(name: str, subject: str, dialect: str) -> str:
        need(name)
        made = stored(subject, shared)
        form = next(form for form in made.forms if form.dialect == dialect)
        found = what_is_wrong(runtime(name), made, form, tmp_path / dialect)
        if found.startswith(("refused", "crashed", "hung")):
            raise RuntimeError(found)  # which is no wrong answer
        return found

    return measure


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a runtime's process run a line of Python first."""

    def change(line: str) -> None:
        monkeypatch.setattr(process, "child_command", worker_after(line))

    return change


def without_option(name: str) -> str:
    """Return Python that removes an option from OpenVINO."""
    return (
        "from attn_export.runtimes.engines import openvino; whole = openvino.default_options\n"
        f"openvino.default_options = lambda threads: {{k: v for k, v in whole(threads).items() "
        f"if k != {name!r}}}"
    )


# -- OpenVINO ---------------------------------------------------------------------------------


@fault("unmasked attention is wrong after a call with one query")
def test_openvino_is_right_after_a_single_query_whatever_its_options(measured, changed):
    changed(without_option("SNIPPETS_MODE"))
    assert measured("openvino", "plain", "portable") == ""


@pytest.mark.parametrize("dialect", ["standard", "portable"])
def test_openvino_is_right_after_a_single_query(measured, dialect):
    assert measured("openvino", "plain", dialect) == ""


@in_bfloat16
@fault("it computes in bfloat16 where the processor can")
def test_openvino_is_as_precise_as_the_graph_whatever_its_options(measured, changed):
    changed(without_option("INFERENCE_PRECISION_HINT"))
    assert measured("openvino", "padding", "portable") == ""


def test_openvino_is_as_precise_as_the_graph(measured):
    assert measured("openvino", "padding", "portable") == ""


@fault("numbers whose last bit is even are rounded towards 0")
def test_openvino_rounds_to_bfloat16_as_onnx_does(measured):
    assert measured("openvino", "bfloat16", "standard") == ""


@fault("GroupQueryAttention is wrong where the batch is not 1")
def test_openvino_is_right_in_the_form_for_onnx_runtime(measured):
    assert measured("openvino", "cache, causal", "ort") == ""


def test_openvino_is_right_in_the_graphs_that_it_runs(measured, shared):
    forms = stored("cache, causal", shared).forms
    given = {form.dialect for form in forms if not known_limit(runtime("openvino"), form)}
    assert given == {"standard", "portable"}
    for dialect in given:
        assert measured("openvino", "cache, causal", dialect) == ""


# -- tract ------------------------------------------------------------------------------------


def causal(path: Path, queries: int, keys: int) -> dict[str, np.ndarray]:
    """Write a causal `Attention` of fewer queries than keys without a past; return its inputs."""
    shapes = {"q": queries, "k": keys, "v": keys}
    axes = {"q": "query_len", "k": "key_len", "v": "key_len", "y": "query_len"}
    q, k, v, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2, axis, 8])
        for name, axis in axes.items()
    )
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
    graph = helper.make_graph([node], "g", [q, k, v], [y])
    opsets = [helper.make_opsetid("", 23)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal((2, 2, size, 8)).astype(np.float32)
        for name, size in shapes.items()
    }


@fault("the last query is aligned with the last key, in ONNX the first with the first")
def test_tract_aligns_causal_queries_as_onnx_does(need, tmp_path):
    need("tract")
    inputs = causal(tmp_path / "m.onnx", queries=3, keys=5)
    (wanted,) = ReferenceEvaluator(onnx.load(tmp_path / "m.onnx")).run(None, inputs)
    got = runtime("tract").load(tmp_path / "m.onnx", 1).run(inputs, {})["y"]
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("subject", ["causal", "cache, causal"])
def test_tract_is_right_where_a_spec_is_causal(measured, subject):
    """Run specs, which have as many new keys as queries: causal with cross-attention is refused."""
    # It adds up the products of 1,024 keys one after the other.
    rounding = r"1 wrong: shape_B3_P0_L1024: output: relative error 2\.[5-9]\de-06 over one row, .*"
    assert re.fullmatch(f"|{rounding}", measured("tract", subject, "standard"))


@fault("rows of which all keys are masked are NaN")
def test_tract_is_right_where_all_keys_are_masked(measured):
    assert measured("tract", "float mask", "standard") == ""


def test_tract_is_right_where_all_keys_are_masked_in_portable_operators(measured):
    assert measured("tract", "float mask", "portable") == ""


# -- outside the default tests ----------------------------------------------------------------


@more
@pytest.mark.parametrize("subject", ["padding", "float mask"])
@fault("rows of which all keys are masked are wrong")
def test_opencv_is_right_where_all_keys_are_masked(measured, subject):
    assert measured("opencv", subject, "standard") == ""


@more
@pytest.mark.parametrize("subject", ["padding", "float mask"])
def test_opencv_is_right_where_all_keys_are_masked_in_portable_operators(measured, subject):
    assert measured("opencv", subject, "portable") == ""


@more
@fault("a plan for one batch is used for another")
def test_mnn_is_right_where_the_batch_changes_whatever_its_options(measured, changed):
    changed("from attn_export.parts.more_runtimes import mnn; mnn.DYNAMIC = False")
    assert measured("mnn", "grouped", "portable") == ""


@more
def test_mnn_is_right_where_the_batch_changes(measured):
    assert measured("mnn", "grouped", "portable") == ""
