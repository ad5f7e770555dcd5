"""Dry runs: kernels, placement and stops of graphs whose behaviour is known from the provider."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import onnx
import pytest
import shared
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from attn_export.errors import GraphError, UsageError
from attn_export.interface import Roles
from attn_export.parts.cuda_dry_run.dry_run import dry_run
from attn_export.parts.cuda_dry_run.dry_run_inputs import (
    StepSizes,
    inputs_of,
    steps_of,
    unknown_axes,
)
from attn_export.parts.cuda_dry_run.dry_run_report import print_dry_run
from attn_export.parts.cuda_dry_run.dry_run_timeline import (
    bytes_copied,
    copies_of_cache,
    kinds_of_attention,
    readable,
)
from attn_export.runtimes.protocol import Limits

HALF, SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT


def standard(path, dtype=HALF, width=256, **attributes):
    """Write one `Attention` of four heads over `query`, three axes."""
    axes = ["batch", "query_len", width]
    query, output = (helper.make_tensor_value_info(n, dtype, axes) for n in ("query", "output"))
    node = helper.make_node(
        "Attention", ["query"] * 3, ["output"], "attention",
        q_num_heads=4, kv_num_heads=4, **attributes,
    )  # fmt: skip
    return _saved(path, [node], [query], [output])


def grouped(path, dtype=HALF, heads=(16, 4, 64)):
    """Write one GroupQueryAttention with a cache in place."""
    H, Hkv, D = heads
    value = helper.make_tensor_value_info
    cache = [value(f"{o}_{k}", dtype, ["batch", Hkv, "capacity", D]) for o, k in OF_CACHE]
    inputs = [
        value("query", dtype, ["batch", "query_len", H * D]),
        *(value(n, dtype, ["batch", "query_len", Hkv * D]) for n in ("key", "value")),
        *cache[:2], value("lengths", TensorProto.INT32, ["batch"]),
        value("total", TensorProto.INT32, [1]),
    ]  # fmt: skip
    output = value("output", dtype, ["batch", "query_len", H * D])
    node = helper.make_node(
        "GroupQueryAttention", [end.name for end in inputs],
        ["output", "present_key", "present_value"], "attention", domain="com.microsoft",
        num_heads=H, kv_num_heads=Hkv,
    )  # fmt: skip
    return _saved(path, [node], inputs, [output, *cache[2:]])


OF_CACHE = [("past", "key"), ("past", "value"), ("present", "key"), ("present", "value")]


def shape_from_device(path):
    """Write a graph that reshapes by a number computed on the device."""
    value = helper.make_tensor_value_info
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    nodes = [
        helper.make_node("Cast", ["query"], ["whole"], "cast", to=TensorProto.INT64),
        helper.make_node("Mul", ["whole", "one"], ["size"], "product"),
        helper.make_node("Expand", ["query", "size"], ["output"], "expand"),
    ]
    ends = [value("query", HALF, [3])], [value("output", HALF, ["a", "b", "c"])]
    return _saved(path, nodes, *ends, [one])


def _saved(path, nodes, inputs, outputs, constants=()):
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(constants))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def seen(path, arch="sm_90", **sizes):
    (found,) = dry_run(path, architectures=[arch], **sizes)
    return found


@pytest.mark.parametrize(
    ("write", "options", "arch", "sizes", "kind"),
    [
        (standard, {}, "sm_80", {"query_len": 64}, "flash attention"),
        (standard, {}, "sm_75", {"query_len": 64}, "CUTLASS memory-efficient"),
        (standard, {"dtype": SINGLE}, "sm_90", {"query_len": 64}, "CUTLASS memory-efficient"),
        (grouped, {}, "sm_90", {"query_len": 1, "past_len": 200}, "XQA"),
        (grouped, {"dtype": TensorProto.BFLOAT16}, "sm_90", {"query_len": 1, "past_len": 200},
         "XQA"),
        (grouped, {}, "sm_75", {"query_len": 1, "past_len": 200}, "CUTLASS memory-efficient"),
        (grouped, {"heads": (71, 1, 64)}, "sm_80", {"query_len": 1, "past_len": 200},
         "flash attention, split K/V"),
        (grouped, {}, "sm_80", {"query_len": 64, "past_len": 0}, "flash attention"),
    ],
)  # fmt: skip
def test_the_kernel_of_attention_is_the_one_that_the_provider_launches(
    need_dry_run, tmp_path, write, options, arch, sizes, kind
):
    found = seen(write(tmp_path / "model.onnx", **options), arch, **sizes)
    assert (found.refused, found.elsewhere) == ("", ())
    assert [step.attention for step in found.steps] == [(kind,)], found.steps
    assert found.steps[0].stopped == ""


def test_attention_without_a_kernel_is_on_the_cpu_with_the_reason(need_dry_run, tmp_path):
    path = grouped(tmp_path / "model.onnx", SINGLE)
    found = seen(path, query_len=1, past_len=10)
    (node,) = (node for node in found.elsewhere if node.is_attention)
    assert (node.operator, node.provider) == ("GroupQueryAttention", "CPUExecutionProvider")
    assert "no kernel of this operator for its types" in node.reason


def test_a_shape_that_the_device_computes_stops_the_run_and_names_the_node(need_dry_run, tmp_path):
    found = seen(shape_from_device(tmp_path / "model.onnx"))
    (step,) = found.steps
    assert step.stopped or step.waits
    assert any("Memcpy" in name or "expand" in name for name in step.waits), step


def test_a_dry_run_that_takes_too_long_is_ended(need_dry_run, tmp_path):
    limits = dataclasses.replace(Limits.default(), seconds=0.2)
    with pytest.raises(GraphError, match=r"model\.onnx takes longer than 0\.2 s"):
        seen(standard(tmp_path / "model.onnx"), limits=limits)


def test_a_launch_is_reported_with_its_node(need_dry_run):
    folder = shared.bundle_of("float16")
    (one,) = dry_run(folder, architectures=["sm_80"], dialects=["standard"])
    prefill, decode = one.steps
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert {event.node for event in decode.events if event.kind == "library"} == {
        "q_proj/MatMul", "k_proj/MatMul", "v_proj/MatMul", "out_proj/MatMul"
    }  # fmt: skip
    assert decode.launches > 4
    assert one.peak_bytes > 0
    assert "cuBLAS" in one.libraries


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architectures": ["sm_81"]}, "choose from sm_75, sm_80, sm_86, sm_89, sm_90, sm_100"),
        ({"dialects": ["other"]}, "unknown dialect 'other'"),
        ({"dialects": ["ort"]}, "--dialect is for bundles"),
        (
            {"batch": 2**25},
            "batch of a dry run is 33554432; give a whole number from 1 to 16777216",
        ),
        ({"query_len": 1.5}, "query_len of a dry run is 1.5"),
        ({"past_len": -1}, "past_len of a dry run is -1; give a whole number from 0"),
        ({"batch": 2**20, "query_len": 2**20}, "inputs take more than 2 GiB with batch 1048576"),
    ],
)
def test_a_wrong_option_is_answered_with_the_right_ones(need_dry_run, tmp_path, options, says):
    with pytest.raises(UsageError, match=says):
        dry_run(standard(tmp_path / "model.onnx"), **options)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a\x3a\xff\xff\xff\x7f"])
def test_a_file_that_is_no_model_is_refused(need_dry_run, tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"model\.onnx"):
        dry_run(path, architectures=["sm_80"])


def test_the_command_prints_kernels_and_never_a_verdict(need_dry_run, cli, tmp_path):
    path = standard(tmp_path / "model.onnx")
    ran = cli("dry-run", path, "--arch", "sm_80", "--arch", "sm_90")
    assert ran.returncode == 0, ran.stderr
    for words in ("nothing was computed", "flash attention", "A100", "H100"):
        assert words in ran.stdout
    assert "passed" not in ran.stdout
    as_json = json.loads(cli("dry-run", path, "--arch", "sm_80", "--json", "-").stdout)
    assert as_json["format"] == "attn-export-dry-run/1"
    (kind,) = as_json["graphs"][0]["steps"][0]["attention"]
    assert kind.startswith("flash attention")
    assert "passed" not in json.dumps(as_json)


def test_a_narrow_terminal_breaks_no_name_of_the_table(need_dry_run, tmp_path):
    found = dry_run(standard(tmp_path / "model.onnx"), architectures=["sm_80"])
    out = io.StringIO()
    print_dry_run(found, Console(file=out, width=40))
    header = next(line for line in out.getvalue().splitlines() if line.startswith("graph"))
    assert header.split() == ["graph", "step", "on", "attention", "launches", "copies", "waits"]
    assert "…" not in out.getvalue()


# -- without the stand-in -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN11onnxruntime4cuda7UngroupI6float2EEvPKS2_PS2_iib", "Ungroup"),
        ("cublasGemmEx", "cublasGemmEx"),
        ("_Zbroken", "_Zbroken"),
        ("void onnxruntime::flash::flash_fwd_kernel<A<1, (B)2>, true>(P)", "flash_fwd_kernel"),
        ("void H64::grp4_fp16::kernel_mha(unsigned int)", "H64::grp4_fp16::kernel_mha"),
    ],
)
def test_kernels_have_readable_names(symbol, name):
    assert readable(symbol) == name


@pytest.mark.parametrize(
    ("names", "kinds", "copies"),
    [
        (["H64::grp4_fp16::kernel_mha"], ("XQA",), {}),
        (["Ungroup", "Ungroup", "flash_fwd_kernel"], ("flash attention",), {"Ungroup": 2}),
        (["UngroupLarge", "UngroupLarge"], (), {"UngroupLarge": 2}),
        (["softmax_warp_forward"], ("unfused: products and softmax",), {}),
        (["Add"], (), {}),
    ],
)
def test_kernels_of_attention_and_copies_of_the_cache_are_distinguished(names, kinds, copies):
    assert kinds_of_attention(names) == kinds
    assert copies_of_cache(names) == copies


OF_QUERY, GROUPED = ("float16", [2, 1, 1024]), ("float16", [2, 4, 512, 64])


@pytest.mark.parametrize(
    ("kernel", "inputs", "outputs", "size"),
    [
        ("flash_fwd_kernel", [OF_QUERY, GROUPED], [OF_QUERY, GROUPED], 0),
        ("Ungroup", [OF_QUERY, GROUPED], [OF_QUERY, GROUPED], 2 * 2 * 512 * 1024),
        ("Ungroup", [OF_QUERY, GROUPED], [("float16", [2, 16, 1, 64])], 2 * 2 * 512 * 1024),
        ("Ungroup", [OF_QUERY, ("float16", [2, 512, 256])], [OF_QUERY], 2 * 2 * 512 * 1024),
        ("ConcatNewToPastKV", [OF_QUERY, GROUPED], [OF_QUERY, GROUPED], 2 * 2 * 512 * 256),
        ("ConcatNewToPastKVFused", [OF_QUERY, GROUPED], [OF_QUERY, GROUPED], 2 * 2 * 2 * 512 * 256),
        ("ConcatKV", [("float", [1, 2, 8]), ("float", [1, 4, 8])], [("float", [1, 2, 8])], 4 * 32),
        ("Ungroup", [], [], 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_bytes_of_copied_keys_follow_from_shapes(kernel, inputs, outputs, size):
    assert bytes_copied(kernel, inputs, outputs) == size


@pytest.mark.parametrize(
    ("shapes", "given", "steps"),
    [
        ([["batch", "query_len", 4]], (None, None), [("prefill", 512, 0)]),
        ([["batch", "query_len", 4], ["batch", "past_len"]], (None, None),
         [("prefill", 512, 0), ("decode", 1, 1023)]),
        ([["batch", 1, 4], ["batch", "capacity"]], (None, None), [("decode", 1, 1023)]),
        ([["batch", "query_len"], ["past_len"]], (5, 7), [("step", 5, 7)]),
        ([["batch", "query_len"]], (5, 7), [("step", 5, 0)]),
    ],
)  # fmt: skip
def test_the_steps_fit_the_inputs(shapes, given, steps):
    found = steps_of(shapes, 1, *given)
    assert [(step.name, step.query_len, step.past_len) for step in found] == steps


def test_axes_have_sizes_by_their_roles_and_unknown_ones_are_named():
    roles = Roles({"past": "past_len", "seq": "query_len"}).with_total({"total": "past + seq"})
    made = inputs_of(
        [End("tensor(float)", ["seq", "past", "total", "extra"])],
        StepSizes("step", 1, 5, 7),
        {},
        roles,
    )
    assert made["x"].shape == (5, 7, 12, 1)
    shapes = [[roles.get(axis, axis) for axis in ("seq", "total", "extra")]]
    assert unknown_axes(shapes) == ("axes of unknown meaning have the size 1: extra",)


class End:
    def __init__(self, kind, shape):
        self.name, self.type, self.shape = "x", kind, shape


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (End("sequence(tensor(float))", []), "no tensor"),
        (End("tensor(float)", [1 << 40]), "more than 2 GiB"),
        (End("tensor(float)", [-1, 3]), "has the shape"),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(end, says):
    with pytest.raises(GraphError, match=says):
        inputs_of([end], StepSizes("step", 1, 1, 0), {})


@pytest.mark.parametrize(
    ("kind", "content"), [("int8", 0), ("uint8", 0), ("int32", 1023), ("int64", 1023)]
)
def test_integers_of_a_cache_are_no_lengths(kind: str, content: int):
    made = inputs_of([End(f"tensor({kind})", [2])], StepSizes("step", 1, 1, 1023), {})
    assert made["x"].tolist() == [content] * 2
