"""`lower` on contrib attention of ONNX Runtime, which goes back to `Attention` or is refused.

`lower` compares both graphs at several sizes, so that the tests look at the nodes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Cli
from onnx import TensorProto, helper, numpy_helper

from attn_export.commands.lower_here import lower_here

H, HKV, D = 4, 2, 32
FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
Values = Mapping[str, tuple[int, list[str | int]]]


def save(path: Path, nodes: list[onnx.NodeProto], inputs: Values, outputs: Values,
         constants: Mapping[str, np.ndarray]) -> Path:  # fmt: skip
    ins, outs = (
        [helper.make_tensor_value_info(name, *what) for name, what in values.items()]
        for values in (inputs, outputs)
    )
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", ins, outs, tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def grouped(path: Path, *, past: bool = False, rotary: int = 0, sink: bool = False,
            bias: bool = False, packed: bool = False, counts: bool = False,
            name: str = "node", **attributes: Any) -> Path:  # fmt: skip
    """Write GroupQueryAttention as generators of ONNX Runtime do: keys are counted in a mask.

    `counts`: Whether inputs say how many keys there are.
    """
    nodes = [
        helper.make_node("Cast", ["mask"], ["ones"], to=INT32),
        helper.make_node("ReduceSum", ["ones", "axis"], ["sums"], keepdims=0),
        helper.make_node("Sub", ["sums", "one"], ["lasts"]),
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "second"], ["long"]),
        helper.make_node("Cast", ["long"], ["total"], to=INT32),
    ]
    inputs: dict[str, tuple[int, list[str | int]]] = {
        "q": (FLOAT, ["B", "L", H * D]), "k": (FLOAT, ["B", "L", HKV * D]),
        "v": (FLOAT, ["B", "L", HKV * D]), "mask": (INT64, ["B", "T"]),
    }  # fmt: skip
    outputs: dict[str, tuple[int, list[str | int]]] = {"y": (FLOAT, ["B", "L", H * D])}
    read = ["q", "k", "v", "", "", "lasts", "total"]
    if past:
        read[3:5] = ["pk", "pv"]
        inputs |= dict.fromkeys(read[3:5], (FLOAT, ["B", HKV, "P", D]))
        outputs |= dict.fromkeys(["nk", "nv"], (FLOAT, ["B", HKV, "T", D]))
    if counts:
        nodes.clear()
        del inputs["mask"]
        inputs |= {"lasts": (INT32, ["B"]), "total": (INT32, [])}
    if packed:
        read[1:3] = "", ""
        inputs = {name: what for name, what in inputs.items() if name not in "kv"}
        inputs["q"] = (FLOAT, ["B", "L", (H + 2 * HKV) * D])
    angles = np.arange(64)[:, None] * 100.0 ** -np.linspace(0, 1, max(rotary // 2, 1))
    constants = {"axis": np.array([1]), "one": np.array(1, np.int32), "second": np.array(1)}
    if rotary:
        read += ["cos", "sin"]
        constants |= {
            "cos": np.cos(angles, dtype=np.float32),
            "sin": np.sin(angles, dtype=np.float32),
        }
    if bias:
        read += [*[""] * (10 - len(read)), "bias"]
        inputs["bias"] = (FLOAT, ["B", 1, "L", "T"])
    if sink:
        read += [*[""] * (11 - len(read)), "sink"]
        constants["sink"] = np.ones(H, np.float32)
    nodes.append(
        helper.make_node(
            "GroupQueryAttention", read, list(outputs), name, domain="com.microsoft",
            num_heads=H, kv_num_heads=HKV, do_rotary=int(rotary > 0), **attributes,
        )
    )  # fmt: skip
    return save(path, nodes, inputs, outputs, constants)


def multi_head(path: Path, names: str = "", *, keys: str = "S", **attributes: Any) -> Path:
    """Write MultiHeadAttention with further inputs, by name."""
    past: tuple[int, list[str | int]] = (FLOAT, ["B", H, "P", D])
    known: Values = {
        "bias": (FLOAT, [3 * H * D]), "pad": (INT32, ["B", "T" if "past" in names else keys]),
        "lengths": (INT32, ["B"]), "added": (FLOAT, [1, H, "L", keys]),
        "past_k": past, "past_v": past,
    }  # fmt: skip
    places = [("bias",), ("pad", "lengths"), ("added",), ("past_k",), ("past_v",)]
    more = [next((n for n in place if n in names.split()), "") for place in places]
    inputs = {
        "q": (FLOAT, ["B", "L", H * D]), "k": (FLOAT, ["B", keys, H * D]),
        "v": (FLOAT, ["B", keys, H * D]), **{n: known[n] for n in more if n},
    }  # fmt: skip
    outputs: dict[str, tuple[int, list[str | int]]] = {"y": (FLOAT, ["B", "L", H * D])}
    if "past_k" in more:
        outputs |= dict.fromkeys(["nk", "nv"], (FLOAT, ["B", H, "T", D]))
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v", *more], list(outputs), "node",
        domain="com.microsoft", num_heads=H, **attributes,
    )  # fmt: skip
    return save(path, [node], inputs, outputs, {})


GROUPED: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 5.0, "scale": 0.2}, "window": {"local_window_size": 3},
    "half rotary": {"rotary": 16, "rotary_interleaved": 1},
    "rotary and a window": {"rotary": 32, "local_window_size": 2},
    "sink": {"sink": True, "softcap": 5.0}, "smooth": {"smooth_softmax": 1},
    "keys counted by inputs": {"counts": True, "rotary": 32, "name": ""},
    "packed": {"sink": True, "packed": True, "rotary": 32},
    "bias": {"bias": True, "packed": True, "local_window_size": 3},
    "bias and smooth": {"bias": True, "smooth_softmax": 1},
}  # fmt: skip
MULTI_HEAD: Mapping[str, Mapping[str, Any]] = {
    "bias": {"names": "bias"}, "padding": {"names": "pad"}, "added": {"names": "added"},
    "padding and added": {"names": "pad added", "mask_filter_value": -1e30},
    "past": {"names": "past_k past_v"}, "padded past": {"names": "pad past_k past_v"},
    "causal": {"names": "past_k past_v", "keys": "L", "unidirectional": 1},
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["standard", "portable"])
@pytest.mark.parametrize("name", [*GROUPED, *MULTI_HEAD])
@pytest.mark.every(3)
def test_contrib_nodes_go_back(name: str, dialect: str, tmp_path: Path):
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    grouped(source, **GROUPED[name]) if name in GROUPED else multi_head(source, **MULTI_HEAD[name])
    lower_here(str(source), str(target), dialect)
    model = onnx.load(target)
    assert not any(node.domain for node in model.graph.node)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"names": "lengths"}, "node: Attention cannot say a key_padding_mask of lengths"),
        ({"qk_output": 1, "name": ""}, "GroupQueryAttention of y cannot be compared with what"),
        ({"past": True}, "node: Attention cannot say the cache of GroupQueryAttention; keep"),
    ],
)
def test_forms_that_attention_lacks_are_named(
    form: dict[str, Any], says: str, tmp_path: Path, cli: Cli
):
    write = multi_head if "names" in form else grouped
    write(tmp_path / "a.onnx", **form)
    done = cli("lower", "a.onnx", "--dialect", "standard", "--output", "b.onnx")
    assert done.returncode == 4
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_contrib_nodes_of_branches_are_refused(tmp_path: Path, cli: Cli):
    path = multi_head(tmp_path / "a.onnx")
    model = onnx.load(path)
    y = helper.make_tensor_value_info("y", FLOAT, ["B", "L", H * D])
    branches = [helper.make_graph([n], "b", [], [y]) for n in (
        model.graph.node[0], helper.make_node("Identity", ["q"], ["y"]))]  # fmt: skip
    del model.graph.node[:]
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    model.graph.node.append(
        helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    )
    onnx.save(model, path)
    done = cli("lower", "a.onnx", "--dialect", "portable", "--output", "b.onnx")
    assert done.returncode == 4
    assert "node: MultiHeadAttention of com.microsoft is not in the portable dialect" in done.stderr
