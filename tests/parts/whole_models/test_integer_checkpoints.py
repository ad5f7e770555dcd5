"""Checkpoints whose weights are integers: the graphs have the same, or a line says why not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from integer_checkpoints import LAYOUTS, Layout, Stored, integer_checkpoint, words
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from shared import extended

from attn_export import DecodeSession, Subject, build
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.main import run
from attn_export.errors import WeightsError
from attn_export.export.export import export
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint

ROWS = {
    "gptq": "llama", "gptq v2, symmetric": "phi3", "gptq, desc_act": "qwen2",
    "gptq, 8 bits": "gemma", "awq": "mistral", "awq, one group": "qwen3",
    "awq, groups of 96": "llama", "awq, groups of 24": "llama", "W4A16": "llama",
    "W4A16, asymmetric": "qwen3", "W8A16": "phi3", "int8": "llama",
    "float8, blocks": "llama", "float8, tensor": "mistral", "float8, channel": "qwen2",
}  # fmt: skip
"""The type of a model for each layout."""

BUILT = {"gptq, desc_act", "awq, one group", "awq, groups of 24", "W8A16", "float8, blocks"}
"""The layouts of which graphs are made by default: each kind of stored integers once."""

EIGHT = onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT8E4M3FN


DIALECTS = "--dialect", "standard", "--dialect", "ort"


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the halves of bytes `[N, …]` side by side, the lower ones first: `[N, count]`."""
    pairs = [(int(byte) % 16, int(byte) // 16) for byte in packed.ravel()]
    return np.array(pairs).reshape(len(packed), -1)


def read_graph(model: onnx.ModelProto) -> Mapping[str, list[np.ndarray]]:
    """Return what each stored weight is, by its name: integers, zero points and scales.

    All are `[out, …]`, with a zero point and a scale for each input, in the order of the inputs.
    """
    tensors = {x.name: numpy_helper.to_array(x) for x in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for node in model.graph.node:
        of = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        names = list(node.input)
        if node.op_type == "MatMulNBits":
            integers = nibbles(tensors[names[1]])
            blocks = math.ceil(of["K"] / of["block_size"])
            scales = tensors[names[2]].reshape(of["N"], blocks)
            zeros = np.full(scales.shape, 8)
            if len(names) > 3:
                zeros = nibbles(tensors[names[3]].reshape(of["N"], -1))[:, :blocks]
            products = [node]
        elif node.op_type == "DequantizeLinear":
            integers, scales = tensors[names[0]].T, tensors[names[1]].T
            is_float = integers.dtype.name.startswith("float8")
            integers = (integers.view(np.uint8) if is_float else integers).astype(int)
            scales = scales.reshape(len(integers), -1)
            zeros = tensors[names[2]].astype(int).T if len(names) > 2 else np.zeros(scales.shape)
            zeros = zeros.reshape(scales.shape)
            products = [x for x in model.graph.node if node.output[0] in x.input]
        else:
            continue
        per = integers.shape[1] // scales.shape[1]
        arrays = [integers, zeros.repeat(per, 1), scales.repeat(per, 1)]
        gathers = {made[x.input[0]].input[1] for x in products
                   if x.input[0] in made and made[x.input[0]].op_type == "Gather"}  # fmt: skip
        if gathers:
            order = tensors[gathers.pop()]
            arrays = [array[:, np.argsort(order)] for array in arrays]
        found[names[node.op_type == "MatMulNBits"].removesuffix(".packed")] = arrays
    return found


def expected(layers: Mapping[str, Stored], name: str) -> list[np.ndarray]:
    """Return what the file holds for a weight of the graph, whose name joins those of layers."""
    above, _, own = name.removesuffix(".weight").removeprefix("model.").rpartition(".")
    paths = sorted(
        (path for path in layers if path.rpartition(".")[0] == above
         and f"_{path.rpartition('.')[2]}_" in f"_{own}_"),
        key=lambda path: f"_{own}_".index(f"_{path.rpartition('.')[2]}_"),
    )  # fmt: skip
    assert "_".join(path.rpartition(".")[2] for path in paths) == own
    parts = [layers[path] for path in paths]
    return [
        np.concatenate([x.integers for x in parts]),
        np.concatenate([x.zeros[:, x.groups] for x in parts]),
        np.concatenate([x.scales[:, x.groups] for x in parts]),
    ]


def written(name: str, folder: Path) -> tuple[torch.nn.Module, Mapping[str, Stored]]:
    """Write a checkpoint of one layer in a layout; return what its integers stand for, and them."""
    of = LAYOUTS[name]
    sizes = {"hidden_size": 96, "intermediate_size": 96} if of.group in (24, 96) else {}
    return integer_checkpoint(folder, ROWS[name], of, num_hidden_layers=1, **sizes)


@pytest.mark.parametrize("name", ROWS)
def test_weights_are_what_the_integers_of_the_checkpoint_stand_for(name, tmp_path):
    model, _ = written(name, tmp_path)
    found = read_checkpoint(tmp_path).load().state_dict()
    assert found.keys() == model.state_dict().keys()
    assert [n for n, x in model.state_dict().items() if not torch.equal(found[n], x)] == []


@pytest.mark.parametrize("name", extended(ROWS, BUILT.__contains__))
def test_graphs_have_the_integers_of_the_checkpoint(name, tmp_path):
    of, (_, layers) = LAYOUTS[name], written(name, tmp_path)
    graphs, _ = lower_all(export(Subject.from_model(tmp_path)), ("standard", "ort"))
    assert len(graphs) == 3
    eights: dict[str, np.ndarray] = {}
    for graph in graphs:
        model = ir.to_proto(graph.model)
        seen, stored = 0, read_graph(model)
        if of.bits == 8 and graph.file.dialect == "ort":
            # ONNX Runtime makes floats of the same integers when it loads the graph.
            assert not stored
            arrays = {x.name: numpy_helper.to_array(x) for x in model.graph.initializer}
            assert all(np.array_equal(arrays[name], array) for name, array in eights.items())
            continue
        if of.bits == 8:
            arrays = {x.name: x for x in model.graph.initializer if x.data_type in EIGHT}
            eights = {name: numpy_helper.to_array(x) for name, x in arrays.items()}
            assert len(eights) >= len(stored)
        for weight, (integers, zeros, scales) in stored.items():
            own, own_zeros, own_scales = expected(layers, weight)
            # In the standard graph, integers around 0 are signed.
            shift = own[0, 0] - integers[0, 0]
            assert shift in (0, 2 ** (of.bits - 1))
            np.testing.assert_array_equal(integers + shift, own)
            np.testing.assert_array_equal(zeros + shift, own_zeros)
            np.testing.assert_array_equal(scales, own_scales)
            seen += own.size
        assert seen == sum(each.integers.size for each in layers.values())
        # MatMulNBits takes blocks of 16 inputs and their multiples.
        packed = any(node.op_type == "MatMulNBits" for node in model.graph.node)
        assert packed == (graph.file.dialect == "ort" and of.group != 24)


@pytest.mark.parametrize(
    "name",
    extended(
        ["gptq, desc_act", "awq", "W4A16", "W8A16", "float8, blocks"],
        {"W4A16", "float8, blocks"}.__contains__,
    ),
)
def test_bundles_give_the_tokens_of_the_dequantised_model(name, tmp_path, capsys):
    folder, out, is_float = tmp_path / "checkpoint", tmp_path / "out", LAYOUTS[name].is_float
    model, _ = integer_checkpoint(folder, ROWS[name], LAYOUTS[name], vocab_size=32)
    options = ["--output", str(out), "--runtime", "ort-cpu", *DIALECTS]
    assert run(["build", "--model", str(folder), *options]) == 0
    told = capsys.readouterr().out
    assert f"are the {'numbers' if is_float else 'integers'} of the checkpoint" in told
    assert ("rounded to 8 bits (accuracy_level 4) in model.ort.onnx" in told) != is_float
    ids = np.arange(3, 9)[None]
    # Rounded inputs may change the order of logits that differ by little.
    steps = DecodeSession(out, dialect="standard").generate(ids, 32, stop=[])
    found = np.concatenate([step.reshape(-1) for step in steps])
    wanted = model.generate(
        torch.from_numpy(ids), max_new_tokens=32, do_sample=False, eos_token_id=99, pad_token_id=0
    )
    np.testing.assert_array_equal(found, wanted[0, ids.shape[1] :])
    assert run(["compare", "--model", str(folder), "--graphs", str(out)]) == 0
    if name == "W4A16":  # the graph of llama has the layouts of the standard one
        assert "in a copy of the graph with accuracy_level 1" in capsys.readouterr().out


def size_of(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors but floating ones."""
    return sum(
        x.nbytes for name, x in tensors.items() if not x.is_floating_point() and x.numel() > 64
    )


def test_bundles_are_not_larger_than_checkpoints(tmp_path):
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    integer_checkpoint(folder, "llama", LAYOUTS["awq"], num_hidden_layers=1)
    build(Subject.from_model(folder), out, dialects=("ort",), runtimes=["ort-cpu"])
    own, theirs = (load_file(next(x.glob("*.safetensors"))) for x in (out, folder))
    assert size_of(own) <= 1.05 * size_of(theirs)


def test_other_integers_than_those_of_the_checkpoint_are_found(tmp_path):
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    model, _ = integer_checkpoint(folder, "llama", LAYOUTS["gptq"], num_hidden_layers=1)
    build(
        Subject.from_model(model, weights_dtype="int4"), out,
        dialects=("ort",), runtimes=["ort-cpu"],
    )  # fmt: skip
    assert run(["compare", "--model", str(folder), "--graphs", str(out)]) == 6


OF_GENAI = Path(__file__).parent / "quantised" / "llama-int4"
FLOATS = Path(__file__).parent / "exports" / "llama" / "checkpoint"


def checkpoint_of_genai(folder: Path) -> None:
    """Write the checkpoint of which onnxruntime-genai's graph has the integers, packed W4A16."""
    model = onnx.load(OF_GENAI / "model.onnx")
    arrays = {x.name: numpy_helper.to_array(x) for x in model.graph.initializer}
    tensors = load_file(FLOATS / "model.safetensors")
    for node in (node for node in model.graph.node if node.op_type == "MatMulNBits"):
        of = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        integers, scales = nibbles(arrays[node.input[1]])[:, : of["K"]], arrays[node.input[2]]
        scales = scales.reshape(of["N"], -1)
        path, start = node.input[1].removesuffix(".MatMul.weight_Q4"), 0
        above, _, own = path.replace(".attn.", ".self_attn.").rpartition(".")
        for name in ("q_proj", "k_proj", "v_proj") if own == "qkv_proj" else (own,):
            weight = f"{above}.{name}.weight".removeprefix(".")
            rows = slice(start, start + len(tensors[weight]))
            start, q, s = rows.stop, integers[rows], scales[rows]
            if of["K"] % of["block_size"]:
                exact = (q - 8) * s.repeat(of["block_size"], 1)[:, : of["K"]]
                tensors[weight] = torch.from_numpy(exact.astype(np.float32))
                continue
            del tensors[weight]
            tensors |= {
                f"{weight}_packed": words(q, 4, 1), f"{weight}_scale": torch.tensor(s),
                f"{weight}_shape": torch.tensor(q.shape),
            }  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    layout = Layout("compressed-tensors", version="pack-quantized", is_symmetric=True)
    config = json.loads((FLOATS / "config.json").read_text())
    config["quantization_config"] = layout.config(["re:.*down_proj"])
    (folder / "config.json").write_text(json.dumps(config))


def test_a_graph_of_others_whose_kernels_round_inputs_needs_a_budget_for_that(tmp_path, capsys):
    checkpoint_of_genai(tmp_path)
    options = ["--model", str(tmp_path), "--graphs", str(OF_GENAI), "--runtime", "ort-cpu"]
    assert run(["compare", *options]) == 6  # its kernels round inputs
    assert "the rest in a copy of the graph with level 1" in capsys.readouterr().out
    assert run(["compare", *options, "--budget", "sqnr>=20"]) == 0
    assert "judged by the integers of the checkpoint" in capsys.readouterr().out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a checkpoint in a layout, written once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoint")
            integer_checkpoint(made[name], "llama", LAYOUTS[name], num_hidden_layers=1)
        return made[name]

    return of


@pytest.mark.parametrize("option", ["--weights-dtype=int4", "--dtype=float16"])
def test_options_that_change_integers_are_refused(option, tmp_path, checkpoints, capsys):
    out = tmp_path / "out"
    assert run(["build", "--model", str(checkpoints("awq")), "-o", str(out), option]) == 2
    error = capsys.readouterr().err
    assert "holds weights of integers, which are built as they are" in error
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_integers_of_4_bits_that_lie_in_bytes_are_read(tmp_path):
    of = Layout("compressed-tensors", bits=4, version="int-quantized")
    model, _ = integer_checkpoint(tmp_path, "llama", of, num_hidden_layers=1)
    found = read_checkpoint(tmp_path).load().state_dict()
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
LAYER = "model.layers.0.mlp.down_proj"


def of_tensor(part: str, change: Callable[[torch.Tensor], Any]) -> Change:
    """Return the change of a tensor of a layer; it is removed if its value is None."""

    def apply(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        value = change(tensors.pop(f"{LAYER}.{part}").clone())
        if value is not None:
            tensors[f"{LAYER}.{part}"] = value.contiguous()

    return apply


def of_config(**values: Any) -> Change:
    return lambda _, config: config.update(values)


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the change of the first number of a tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def of_group(**values: Any) -> Change:
    """Return the change of what the config of compressed-tensors says of weights."""
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(values)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def nan_of_float8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).fill_(127).view(tensor.dtype)


SCALE = "weight_scale_inv"
BAD: list[tuple[str, Change, str]] = [
    ("gptq", of_config(quant_method="hqq"), r"quant_method 'hqq' is not read .*dequantize\(\)"),
    ("gptq", of_config(quant_method="bitsandbytes"), r"quant_method 'bitsandbytes' .*dequantize"),
    ("gptq", of_config(quant_method=["gptq"]), r"quant_method \['gptq'\] is not read"),
    ("gptq", of_config(bits=3), "bits 3 is not read"),
    ("gptq", of_config(bits=8), "it has 4 bits in groups of 32, and the config says 8 bits in"),
    ("gptq", of_config(group_size=64), "it has 4 bits in groups of 32, and the config says 4 bits"),
    ("gptq", of_config(group_size=-7), "group_size is a number of inputs, or -1 for all; got -7"),
    ("gptq", of_config(group_size="1"), "group_size is a number of inputs, or -1 for all; got '1'"),
    ("gptq", of_config(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not read"),
    ("gptq", of_config(dynamic={"x": 1}), "dynamic holds no object"),
    ("gptq, desc_act", of_tensor("g_idx", lambda _: None), "g_idx is missing, which the config"),
    ("gptq", of_tensor("qzeros", lambda _: None), "qzeros is missing"),
    ("gptq", of_tensor("scales", lambda _: None), "scales is missing"),
    ("gptq", of_tensor("scales", first(math.nan)), "a scale is NaN or infinite"),
    ("gptq", of_tensor("scales", first(math.inf)), "a scale is NaN or infinite"),
    ("gptq", of_tensor("scales", rows), r"qzeros is \[2, 8\], expected \[1, 8\]"),
    ("gptq", of_tensor("scales", torch.Tensor.double), "scales is F64, not F32 or F16 or BF16"),
    ("gptq", of_tensor("qweight", rows), r"g_idx is \[64\], expected \[56\]"),
    ("gptq", of_tensor("qweight", lambda x: x[:, :-1]), r"qweight is \[8, 63\], expected"),
    ("gptq", of_tensor("qweight", torch.Tensor.long), "qweight is I64, not I32"),
    ("gptq", of_tensor("qweight", torch.flatten), "the wrong number of axes"),
    ("gptq", of_tensor("g_idx", first(2)), "g_idx names groups outside 0 to 1"),
    ("gptq", of_tensor("g_idx", first(-1)), "g_idx names groups outside 0 to 1"),
    ("gptq", of_tensor("g_idx", first(1)), "g_idx has groups of 31 to 33 inputs"),
    ("gptq", of_tensor("g_idx", rows), r"g_idx is \[63\], expected \[64\]"),
    ("gptq", of_tensor("bias", first(1)), "has, and its config does not, 1 tensors"),
    ("gptq", of_config(quant_method="awq"), r"down_proj .*: qweight is \[8, 64\], expected"),
    ("awq", of_config(version="gemv"), "version 'gemv' is not read"),
    ("awq", of_config(bits=8), "bits 8 is not read"),
    ("awq", of_tensor("qzeros", lambda x: x[:, :-1]), r"qzeros is \[2, 7\], expected \[2, 8\]"),
    ("W4A16", of_config(format="marlin-24"), "format 'marlin-24' is not read"),
    ("W4A16", of_config(config_groups={}), "config_groups names no weights"),
    ("W4A16", of_config(kv_cache_scheme={"x": 1}), "kv_cache_scheme changes more than weights"),
    ("W4A16", of_config(sparsity_config={"format": "sparse"}), "sparsity_config 'sparse'"),
    ("W4A16", of_group(type="float"), "weights that are no int, as its format says"),
    ("W4A16", of_group(symmetric=False), "weight_zero_point is missing, which the config asks for"),
    ("W4A16", of_group(strategy="block"), "strategy 'block' is not read"),
    ("W4A16", of_tensor("weight_shape", first(2**40)), r"expected \[1099511627776, 8\]"),
    ("W4A16", of_tensor("weight_shape", first(-8)), r"expected \[-8, 8\]"),
    ("W4A16", of_tensor("weight_packed", lambda _: None), "lacks 1 tensors .*down_proj.weight"),
    ("int8", of_tensor("weight", torch.Tensor.float), "weight is F32, not I8"),
    ("int8", of_tensor("weight", lambda _: None), r"down_proj\.weight is missing, and its config"),
    ("int8", of_tensor("weight_zero_point", torch.Tensor.int), "weight_zero_point is"),
    ("awq", of_tensor("scales", torch.zeros_like), "a scale is 0, and its integers are not"),
    ("W4A16", of_config(format=["x"]), r"format \['x'\] is not read"),
    ("float8, blocks", of_config(fmt="e5m2"), "fmt 'e5m2' is not read"),
    ("float8, blocks", of_config(weight_block_size=[0, 8]), r"two sizes, as .*; got \[0, 8\]"),
    ("float8, blocks", of_config(weight_block_size=[32, 48]), r"is \[3, 2\], expected \[2, 2\]"),
    ("float8, blocks", of_tensor("weight", torch.Tensor.float), "weight is F32, not F8_E4M3"),
    ("float8, blocks", of_tensor("weight", torch.flatten), "weight is .*, not .out, in"),
    ("float8, blocks", of_tensor("weight", nan_of_float8), "a weight is NaN"),
    ("float8, blocks", of_tensor(SCALE, lambda _: None), "weight_scale is missing"),
    ("float8, blocks", of_tensor(SCALE, rows), r"weight_scale_inv is \[2, 2\], expected \[3, 2\]"),
    ("float8, blocks", of_tensor(SCALE, first(0)), "a scale is NaN, infinite, 0 or negative"),
    ("float8, blocks", of_tensor(SCALE, first(math.nan)), "a scale is NaN, infinite, 0 or"),
    ("float8, channel", of_group(strategy="group"), "strategy 'group' is not read"),
    ("float8, channel", of_group(type="int"), "weights that are no float, as its format says"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=range(len(BAD)))
def test_what_is_no_layer_of_its_format_is_refused(name, change, message, checkpoints, tmp_path):
    config = json.loads((checkpoints(name) / "config.json").read_text())
    tensors = load_file(checkpoints(name) / "model.safetensors")
    change(tensors, config["quantization_config"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message) as error:
        read_checkpoint(tmp_path).load()
    assert "\n" not in str(error.value)
