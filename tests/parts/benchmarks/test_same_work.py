"""Equal work of the candidates that are compared."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from measuring.dims import Dims
from measuring.plain_attention import PlainAttention, StaticAttention, bare_plain
from measuring.workload_candidates import DIALECT, form_for, lowered_graphs, save_core

from attn_export.attention import Attention
from attn_export.parts.benchmarks import own_graphs, torch_layers
from attn_export.parts.benchmarks.feeds import ALIGNMENT, Feed, empty, feeds_of, filled
from attn_export.parts.benchmarks.torch_layers import tensor
from attn_export.spec import AttentionSpec

SIZES = {
    f"{name}{' causal' if causal else ''}, Hkv {heads}": Dims(
        batch=2, query_len=L, key_len=S, num_heads=4, num_kv_heads=heads, head_dim=8,
        causal=causal,
    )
    for name, L, S, causal in (
        ("decode", 1, 40, True), ("prefill", 24, 24, False), ("prefill", 24, 24, True),
    )
    for heads in (4, 2, 1)
}  # fmt: skip


def graph_output(file: Path, feeds: dict[str, Feed], layouts=()) -> np.ndarray:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = {}
    for end in session.get_inputs():
        array = filled(feeds[end.name], list(feeds).index(end.name))
        axes = dict(layouts).get(end.name)
        inputs[end.name] = np.ascontiguousarray(array.transpose(axes)) if axes else array
    names = [output.name for output in session.get_outputs()]
    return session.run(names, inputs)[names.index("output")]


def plain_output(dims: Dims) -> np.ndarray:
    """Return the output of an attention with a concatenating cache."""
    feeds = dims.inputs(in_place=bool(dims.past_len))
    inputs = {n: tensor(f, i) for i, (n, f) in enumerate(feeds.items()) if n != "past_length"}
    for name in ("past_key", "past_value"):
        if name in inputs:
            inputs[name] = inputs[name][:, :, : dims.past_len]
    with torch.inference_mode():
        result = PlainAttention(dims)(**inputs)
    return (result[0] if isinstance(result, tuple) else result).numpy()


@pytest.mark.parametrize("dialect", ["standard", DIALECT])
@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_our_graphs_give_what_plain_torch_gives(dims: Dims, dialect: str, tmp_path: Path):
    forms = lowered_graphs(save_core(dims, tmp_path / "core.onnx"), dialect, tmp_path)
    form = form_for(forms, dims.sizes)
    feeds = dims.inputs(in_place=bool(dims.past_len))
    got = graph_output(tmp_path / form.name, feeds, form.layouts)
    assert np.abs(got - plain_output(dims)).max() < 1e-5


@pytest.mark.parametrize("dims", [d for d in SIZES.values() if d.past_len], ids=str)
def test_a_static_cache_gives_what_a_growing_one_gives(dims: Dims):
    static = StaticAttention(dims)
    new = {
        name: tensor(feed, seed) for seed, (name, feed) in enumerate(dims.token_inputs().items())
    }
    past = [x[:, :, : dims.past_len].clone() for x in (static.keys, static.values)]
    with torch.inference_mode():
        grown = PlainAttention(dims)(**new, past_key=past[0], past_value=past[1])
        assert torch.allclose(static(**new), grown[0], atol=1e-6)


@pytest.mark.parametrize("dims", [SIZES["decode causal, Hkv 2"], SIZES["prefill causal, Hkv 1"]])
def test_the_bare_graph_takes_other_sizes_than_its_example(dims: Dims, tmp_path: Path):
    bare_plain(dataclasses.asdict(dims), str(tmp_path / "bare.onnx"))
    feeds = dims.inputs(in_place=False)
    got = graph_output(tmp_path / "bare.onnx", feeds)
    inputs = {name: tensor(feed, seed) for seed, (name, feed) in enumerate(feeds.items())}
    with torch.inference_mode():
        wanted = PlainAttention(dims)(**inputs)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert np.abs(got - wanted.numpy()).max() < 1e-5


BARE_SPEC = "attn_export.parts.benchmarks.torch_layers:bare_spec"


def test_a_missing_graph_is_exported_in_a_process_of_its_own(tmp_path: Path):
    spec = {"embed_dim": 8, "num_heads": 2}
    job = {"function": BARE_SPEC, "spec": spec}
    options = {"file": str(tmp_path / "bare.onnx"), "export": job}
    file = own_graphs.ensure_graph_file(options)
    feeds = feeds_of(AttentionSpec(**spec).inputs(), AT)
    assert graph_output(file, feeds).shape == (2, 1, 8)
    job.clear()  # it is not needed any more
    assert own_graphs.ensure_graph_file(options) == file


@pytest.mark.parametrize(
    ("function", "seconds", "reason"),
    [
        (BARE_SPEC, 60.0, "num_heads must be "),
        ("attn_export.parts.benchmarks.torch_layers:none", 60.0, "AttributeError: "),
        (BARE_SPEC, 0.01, "timed out after 0.01 s"),
    ],
)
def test_a_failed_export_states_the_reason(
    function: str, seconds: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(own_graphs, "EXPORT_SECONDS", seconds)
    job = {"function": function, "spec": {"embed_dim": 8, "num_heads": 0}}
    with pytest.raises(RuntimeError, match=f"^the export failed: {reason}"):
        own_graphs.make_graph(job, tmp_path / "bare.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_holds_values_transposed_gets_them_so(tmp_path: Path):
    import onnx
    from onnx import TensorProto, helper

    shape = [1, 2, 8, 5]
    node = helper.make_node("Mul", ["past_value", "past_value"], ["present_value"])
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in ("past_value", "present_value")
    ]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "g.onnx")
    feed = Feed((1, 2, 5, 8)).to_json()
    options = {
        "file": str(tmp_path / "g.onnx"), "inputs": {"past_value": feed},
        "outputs": {"present_value": feed},
        "layouts": {"past_value": [0, 1, 3, 2], "present_value": [0, 1, 3, 2]},
        "bound": {"present_value": "past_value"},
    }  # fmt: skip
    prepared = own_graphs.make_in_ort(options, 1)
    held = prepared.run()["past_value"]
    assert held.shape == (1, 2, 8, 5)
    # It was written in place: each run squares what is there.
    before = held.copy()
    prepared.run()
    assert (held == before * before).all()
    with pytest.raises(Exception, match="past_value"):
        own_graphs.make_in_ort({**options, "layouts": {}}, 1).run()
    with pytest.raises(ValueError, match="the graph has past_value, for which no sizes"):
        own_graphs.make_in_ort({**options, "inputs": {}}, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_arrays_are_aligned_shared_with_onnx_runtime_and_the_same_from_a_seed(dtype: str):
    feed = Feed((3, 5), dtype, 1 if dtype in ("int64", "bool") else None)
    array = filled(feed, 7)
    assert array.ctypes.data % ALIGNMENT == 0
    assert array.dtype.name == dtype
    assert (array == filled(feed, 7)).all()
    assert own_graphs.ort_value(array).data_ptr() == array.ctypes.data
    assert empty(Feed((2, 0, 3), dtype)).shape == (2, 0, 3)
    assert Feed.from_json(feed.to_json()) == feed


SPEC = {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "causal": True, "cache": "append",
        "rotary": "half"}  # fmt: skip
AT = {"batch": 2, "query_len": 1, "past_len": 9, "total_len": 10, "key_len": 10, "capacity": 10}


@pytest.mark.parametrize("static", [False, True])
def test_a_specs_module_runs_as_it_is_and_with_a_static_cache(static: bool):
    options = {"spec": SPEC, "sizes": AT, "static": static, "compile": False}
    changed: list[Attention] = []
    result = torch_layers.make_layer(options, 1, changed.append).run()
    assert len(changed) == 1
    assert [x.shape for x in result] == [(2, 1, 32), (2, 2, 10, 8), (2, 2, 10, 8)]


def test_the_level_of_log_messages_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    with pytest.raises(ValueError, match="of the export"), torch_layers.suppress_warnings():
        raise ValueError("of the export")
    assert logging.root.manager.disable == logging.INFO
