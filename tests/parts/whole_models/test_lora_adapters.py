"""`--adapter`: LoRA adapters in the layout of peft, merged into the model of the reference.

peft is not needed: the expected weights are computed here from its definition.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from test_compare_models import EXPORTS, RUN
from torch import Tensor

from attn_export.commands.compare import compare_models
from attn_export.errors import UsageError, WeightsError
from attn_export.parts.whole_models.export_layouts import read_export
from attn_export.parts.whole_models.lora_adapter import merge_adapter, other_adapters, read_adapter
from attn_export.parts.whole_models.model_call import ModelCall
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.model_reference import reference_of

LLAMA, GPT2, BERT = (EXPORTS / name / "checkpoint" for name in ("llama", "gpt2", "bert"))
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "auto_mapping": None, "base_model_name_or_path": "tiny", "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layers_to_transform": None, "lora_alpha": 16, "lora_dropout": 0.05, "modules_to_save": None,
    "r": 4, "rank_pattern": {}, "alpha_pattern": {}, "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
}  # fmt: skip


def model_of(checkpoint: Path) -> Any:
    return read_checkpoint(checkpoint).load()


def write(
    folder: Path, checkpoint: Path, ranks: Callable[[str], int] = lambda _: 4, **config: Any
) -> dict[str, Tensor]:
    """Write an adapter as `PeftModel.save_pretrained` does; return its tensors."""
    folder.mkdir(exist_ok=True)
    values, tensors = CONFIG | config, dict[str, Tensor]()
    torch.manual_seed(0)
    for path, module in model_of(checkpoint).named_modules():
        if path.split(".")[-1] in values["target_modules"]:
            out, into = module.weight.shape
            if type(module).__name__ == "Conv1D":
                out, into = into, out
            rank, name = ranks(path), f"base_model.model.{path}.lora_"
            if isinstance(module, torch.nn.Embedding):
                tensors[f"{name}embedding_A"] = torch.randn(rank, out) / 10
                tensors[f"{name}embedding_B"] = torch.randn(into, rank) / 10
            else:
                tensors[f"{name}A.weight"] = torch.randn(rank, into) / 10
                tensors[f"{name}B.weight"] = torch.randn(out, rank) / 10
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return tensors


def added(checkpoint: Path, folder: Path, path: str) -> Tensor:
    """Return what merging adds to a weight."""
    merged = model_of(checkpoint)
    merge_adapter(folder, checkpoint, merged)
    before, after = (m.get_submodule(path).weight for m in (model_of(checkpoint), merged))
    difference: Tensor = (after.double() - before.double()).detach()
    return difference


@pytest.mark.parametrize(
    ("checkpoint", "path", "config", "scale"),
    [
        (LLAMA, Q1, {}, 16 / 4),
        (LLAMA, Q1, {"use_rslora": True}, 16 / 2),
        (LLAMA, Q1, {"alpha_pattern": {"q_proj": 2}}, 2 / 4),
        (LLAMA, Q1, {"alpha_pattern": {r"layers\.0\..*": 2}}, 16 / 4),
        (LLAMA, Q1, {"rank_pattern": {"1.self_attn.q_proj": 2}}, 8),
        (GPT2, "transformer.h.0.mlp.c_fc",
         {"target_modules": ["c_fc"], "fan_in_fan_out": True}, 16 / 4),
    ],
    ids=str,
)  # fmt: skip
def test_a_weight_gets_the_scaled_product(tmp_path, checkpoint, path, config, scale):
    patterns = config.get("rank_pattern", {})
    tensors = write(
        tmp_path / "a", checkpoint, lambda at: 2 if any(at.endswith(x) for x in patterns) else 4,
        **config,
    )  # fmt: skip
    got = added(checkpoint, tmp_path / "a", path)
    a, b = (tensors[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")
    right = scale * (b.double() @ a.double())
    right = right.T if checkpoint == GPT2 else right
    assert torch.allclose(got, right, atol=1e-6)


def test_embeddings_biases_and_saved_modules_are_merged(tmp_path):
    """As peft does: an embedding's product is turned, and the others are replaced."""
    folder = tmp_path / "a"
    at = "bert.embeddings.token_type_embeddings"
    tensors = write(
        folder, BERT, target_modules=["token_type_embeddings"], bias="all",
        modules_to_save=["classifier", "pooler", "LayerNorm"],
    )  # fmt: skip
    base = model_of(BERT)
    if at.removeprefix("bert.") in dict(base.named_modules()):
        at = at.removeprefix("bert.")
    norm = next(n for n, _ in base.named_parameters() if n.endswith("embeddings.LayerNorm.weight"))
    bias = next(n for n, _ in base.named_parameters() if n.endswith("self.query.bias"))
    replaced = {name: torch.randn_like(base.get_parameter(name)) for name in (norm, bias)}
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in replaced.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    merged = model_of(BERT)
    merge_adapter(folder, BERT, merged)
    a, b = (tensors[f"base_model.model.{at}.lora_embedding_{part}"] for part in "AB")
    assert torch.allclose(added(BERT, folder, at), 4 * (b @ a).T.double(), atol=1e-6)
    for name, tensor in replaced.items():
        assert torch.equal(merged.get_parameter(name), tensor)


def without(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"peft_type": "IA3"}, None, "peft_type 'IA3' is not supported, LORA is"),
        ({"peft_type": ["LORA"]}, None, "peft_type ['LORA'] is not supported"),
        ({"use_dora": True}, None, "use_dora is not supported; merge the adapter"),
        ({"layer_replication": [[0, 2]]}, None, "layer_replication is not supported"),
        ({"target_parameters": ["w"]}, None, "target_parameters is not supported"),
        ({"init_lora_weights": "pissa"}, None, "'pissa' changes the weights of the base"),
        ({"bias": "some"}, None, "bias is none, all or lora_only; got 'some'"),
        ({"r": 8}, None, "the model and rank 8 need [8, 32]"),
        ({"r": "4"}, None, "r must be a number; got '4'"),
        ({"lora_alpha": 0}, None, "lora_alpha must be a number; got 0"),
        ({"alpha_pattern": {"(a+)+$": 1}}, None, "give plain paths"),
        ({"alpha_pattern": {"a*b*c*d*": 1}}, None, "give plain paths"),
        ({"alpha_pattern": [1]}, None, "alpha_pattern must be an object"),
        ({"target_modules": ["q_proj", "o_proj"]}, without(
            *(f"base_model.model.model.layers.{n}.self_attn.o_proj.lora_{x}.weight"
              for n in (0, 1) for x in "AB")),
         "target_modules has 'o_proj', of which adapter_model.safetensors has no tensor"),
        ({}, without(f"{Q}.lora_A.weight"), "has only lora_B of model.layers.0.self_attn.q_proj"),
        ({}, with_tensor(f"{Q}.lora_A.weight", torch.full((4, 64), torch.nan)), "no finite"),
        ({}, with_tensor(f"{Q}.lora_A.weight", torch.zeros(4, 3)), "are [4, 3] and [32, 4]"),
        ({}, with_tensor("base_model.model.score.weight", torch.zeros(2)), "is no lora_A or"),
        ({}, with_tensor(f"{Q}.lora_magnitude_vector", torch.zeros(64)), "is no lora_A or"),
        ({}, lambda t: [t.update({k.replace("q_proj", "w"): t.pop(k)}) for k in [*t]],
         "which the model lacks; give the adapter of this model"),
    ],
)  # fmt: skip
def test_other_kinds_and_damaged_adapters_are_refused(tmp_path, config, change, message):
    tensors = write(tmp_path, LLAMA, **config)
    if change is not None:
        change(tensors)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightsError) as error:
        read_adapter(tmp_path, model_of(LLAMA))
    assert message in str(error.value)


def test_a_pickle_and_a_missing_file_are_refused(tmp_path):
    write(tmp_path, LLAMA)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(WeightsError, match=r"adapter_model\.bin is a pickle.*safe_serialization"):
        read_adapter(tmp_path, model_of(LLAMA))
    with pytest.raises(WeightsError, match=r"cannot read the config of the adapter"):
        read_adapter(tmp_path / "none", model_of(LLAMA))
    with pytest.raises(UsageError, match="for the folder of a checkpoint"):
        merge_adapter(tmp_path, model_of(LLAMA), model_of(LLAMA))


def test_a_weight_that_two_modules_share_is_refused(tmp_path):
    write(tmp_path, GPT2, target_modules=["wte", "c_fc"], fan_in_fan_out=True)
    model = model_of(GPT2)
    model.lm_head.weight = model.transformer.wte.weight
    with pytest.raises(WeightsError, match="which are one weight; save the base with"):
        read_adapter(tmp_path, model)


# -- causes ---------------------------------------------------------------------------------------

WRONG = {
    0.0: "the adapter is missing in model.layers.*.self_attn (explains 99.9",
    1.0: "B · A is added in model.layers.*.self_attn without alpha / r (",
    8.0: "the adapter is scaled in model.layers.*.self_attn by alpha / sqrt(r) where use_rslora",
    16.0: "the adapter is scaled in model.layers.*.self_attn by alpha, not by alpha / r",
    -4.0: "the adapter is subtracted in model.layers.*.self_attn",
    1.5: "the adapter is scaled by 1.5 where alpha / r is 4 (",
}
"""The cause by the scale that a graph has in place of 16 / 4."""


@pytest.mark.parametrize("scale", [*WRONG, torch.bfloat16, torch.float16])
@pytest.mark.every(3)
def test_a_wrong_scale_or_type_is_the_cause(tmp_path, scale):
    write(tmp_path, LLAMA, lora_alpha=16)
    right, wrong = model_of(LLAMA), model_of(LLAMA)
    dtype, sentence = torch.float64, WRONG.get(scale)
    if sentence is None:
        dtype, scale = scale, 4.0
        sentence = f"the adapter is merged in {str(dtype)[6:]} in model.layers.*.self_attn ("
        for model in (right, wrong):
            model.to(dtype).float()
    adapter = read_adapter(tmp_path, right)
    adapter.merge_into(right)
    for delta in adapter.deltas:
        weight = wrong.get_submodule(delta.path).weight
        weight.data = (weight.to(dtype) + delta.times(scale).to(dtype)).float()
    entry = read_export(EXPORTS / "llama" / "mobius").entries[0]
    reference = reference_of(right, entry, frozenset({"batch"}))
    oracle, case = reference.oracle(0.0), reference.plan().cases[0]
    with torch.inference_mode():
        outputs = ModelCall(wrong, entry)(
            **{n: torch.from_numpy(a) for n, a in case.inputs.items()}
        )
    got = dict(zip(entry.outputs, (x.numpy() for x in outputs), strict=True))
    cause = oracle.cause(oracle.golden(case), got, lambda _: False)
    assert sentence in cause.sentence
    assert [*other_adapters(model_of(LLAMA))] == []


def merged_graph(folder: Path, tensors: dict[str, Tensor], scale: float) -> Path:
    """Return the folder of mobius's graph of llama with an adapter merged."""
    shutil.copytree(EXPORTS / "llama" / "mobius", folder)
    graph, base = onnx.load(folder / "model.onnx"), model_of(LLAMA)
    arrays = {x.name: numpy_helper.to_array(x) for x in graph.graph.initializer}
    for name in {name.partition(".lora_")[0] for name in tensors}:
        a, b = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        weight = base.get_submodule(name.removeprefix("base_model.model.")).weight.detach()
        changed = (weight + scale * b @ a).numpy()
        for tensor in graph.graph.initializer:
            for old, new in ((weight.numpy(), changed), (weight.numpy().T, changed.T)):
                if np.array_equal(arrays[tensor.name], old):
                    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(new), tensor.name))
    onnx.save(graph, folder / "model.onnx")
    return folder


def unmerged_graph(folder: Path, tensors: dict[str, Tensor], scale: float) -> Path:
    """Return the folder of mobius's graph of llama with W · x + scale · B · A · x."""
    shutil.copytree(EXPORTS / "llama" / "mobius", folder)
    graph, base = onnx.load(folder / "model.onnx"), model_of(LLAMA)
    arrays = {x.name: numpy_helper.to_array(x) for x in graph.graph.initializer}
    nodes = []
    for node in graph.graph.node:
        weight = arrays.get(node.input[1]) if node.op_type == "MatMul" else None
        nodes.append(node)
        for name in {name.partition(".lora_")[0] for name in tensors} if weight is not None else ():
            own = base.get_submodule(name.removeprefix("base_model.model.")).weight.detach()
            if not np.array_equal(own.T, weight):
                continue
            (y,), x = node.output, node.input[0]
            node.output[0] = f"{y}_base"
            for part in "AB":
                turned = tensors[f"{name}.lora_{part}.weight"].numpy().T.copy()
                graph.graph.initializer.append(numpy_helper.from_array(turned, f"{name}.{part}"))
            factor = numpy_helper.from_array(np.float32(scale), f"{name}.scale")
            graph.graph.initializer.append(factor)
            nodes += [
                onnx.helper.make_node("MatMul", [x, f"{name}.A"], [f"{y}_a"], f"{name}.lora_A"),
                onnx.helper.make_node("MatMul", [f"{y}_a", f"{name}.B"], [f"{y}_b"], f"{name}.b"),
                onnx.helper.make_node("Mul", [f"{y}_b", factor.name], [f"{y}_s"], f"{name}.mul"),
                onnx.helper.make_node("Add", [f"{y}_base", f"{y}_s"], [y], f"{name}.add"),
            ]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    onnx.save(graph, folder / "model.onnx")
    return folder


def test_an_unmerged_graph_is_compared_product_by_product(tmp_path):
    """W · x is in no merged model; the first value that is wrong is the product with its factor."""
    tensors = write(tmp_path / "a", LLAMA)
    wrong = unmerged_graph(tmp_path / "wrong", tensors, 1.5)
    report = compare_models(LLAMA, wrong, RUN, adapter=tmp_path / "a")
    assert "Mul base_model.model.model.layers.0.self_attn." in report.explanations[0]
    assert ".mul" in report.explanations[0]


def test_a_graph_with_the_adapter_passes_and_one_without_its_scale_does_not(tmp_path):
    checkpoint = shutil.copytree(LLAMA, tmp_path / "checkpoint")
    tensors = write(checkpoint, LLAMA)  # beside its base
    right, wrong = (merged_graph(tmp_path / f"{x}", tensors, x) for x in (4.0, 1.0))
    report = compare_models(checkpoint, right, RUN, adapter=checkpoint)
    assert report.passed
    assert not any("left out" in note for note in report.notes)
    assert f"the adapter {checkpoint} is merged: 4 products B · A" in report.notes
    report = compare_models(checkpoint, wrong, RUN, adapter=checkpoint)
    assert "without alpha / r (explains 99.9" in report.explanations[0]
