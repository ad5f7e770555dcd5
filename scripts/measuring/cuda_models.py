"""Whole models on a GPU: bundles made on any machine, and their verdicts, kernels and times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, StaticCache

from attn_export.commands.build import build
from attn_export.commands.verify import verify
from attn_export.dialect_names import CUDA, ORT, STANDARD, WEIGHTS
from attn_export.export.subject import Subject
from attn_export.parts.cuda_dry_run.dry_run import observe
from attn_export.parts.cuda_dry_run.dry_run_inputs import caches_in_place
from attn_export.parts.cuda_dry_run.dry_run_results import architectures_named
from attn_export.parts.whole_models.model_caches import cache_name
from attn_export.report.data import finite
from attn_export.report.tables import largest
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile
from measuring.cuda_layers import PREFILL, STEP, graphs_of
from measuring.cuda_runs import Run

_SMALL = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {
    "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 128,
}  # fmt: skip
_QWEN3_0_6B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_3_2_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    "rope_theta": 5e5, "tie_word_embeddings": True,
}  # fmt: skip
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "qwen3": ("qwen3", {**_SMALL, "head_dim": 128}),
    "gemma3": ("gemma3_text", {**_SMALL, **_WINDOW, "head_dim": 128}),
    "qwen3-0.6b": ("qwen3", _QWEN3_0_6B),
    "llama-3.2-1b": ("llama", _LLAMA_3_2_1B),
}
"""The type of the model and the fields of its config."""

WHOLE = (
    "llama float16", "qwen3 float16", "qwen3 bfloat16", "llama bfloat16", "gemma3 float16",
    "llama float32", "qwen3-0.6b float16", "llama-3.2-1b float16",
)  # fmt: skip
"""Kinds with dtypes. Weights are random; the last two have none until they are measured."""

STEPS = {"decode": STEP, "decode, B 8": (8, 1, 1023), "prefill": PREFILL}
_MOST_JUDGED = 4
"""The most layers of a model that is judged. Others have graphs only."""


def prepare(place: Path, type_of_model: str, dtype: str, fields: Mapping[str, Any]) -> None:
    """Make a model's `config.json`, `bundle` and `kernels.json`, the kernels of dry runs.

    Args:
        place: The new folder, whose name ends with a space and the dtype.
        type_of_model: The type of the model in transformers.
        dtype: The type of weights, caches and logits.
        fields: Fields of the config.
    """
    torch.manual_seed(7)
    config = CONFIG_MAPPING[type_of_model](**fields)
    model = _model_of(config, dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight += 0.2 * torch.randn_like(weight)
    config.save_pretrained(place)
    subject, bundle = Subject.from_model(model, dtype=dtype), place / "bundle"
    if config.num_hidden_layers > _MOST_JUDGED:
        bundle.mkdir()
        graphs_of(subject, bundle)
    else:
        dialects = (STANDARD, ORT) if dtype == "float32" else (STANDARD, ORT, CUDA)
        report = build(subject, bundle, runtimes=["ort-cpu"], dialects=dialects)
        if not report.passed:
            raise SystemExit(f"{place}: {report.verdicts}")
    (place / "kernels.json").write_text(json.dumps(_kernels_of_dry_runs(bundle), indent=1))
    if config.num_hidden_layers > _MOST_JUDGED:
        (bundle / WEIGHTS).unlink()


def _kernels_of_dry_runs(bundle: Path) -> dict[str, dict[str, list[str]]]:
    """Return the kernels and calls of cuBLAS in each step, by architecture."""
    kernels: dict[str, dict[str, list[str]]] = {}
    for card in architectures_named(()):
        found = kernels[card.name] = {}
        for step, sizes in STEPS.items():
            if file := cuda_graph(bundle, step):
                (run,) = observe(bundle, file, card, sizes).steps
                found[step] = [e.name for e in run.events if e.kind in ("launch", "library")]
    return kernels


def _model_of(config: Any, **options: Any) -> Any:
    # transformers gives this method no types.
    return AutoModelForCausalLM.from_config(config, **options).eval()  # type: ignore[no-untyped-call]


def cuda_graph(bundle: Path, step: str) -> GraphFile | None:
    """Return the `cuda` graph that serves a step, if there is one."""
    phase = step.partition(",")[0]
    file = bundle / f"model.cuda.{phase}.onnx"
    if not file.exists():
        return None
    model = onnx.load(file, load_external_data=False)
    fixed = {"query_len": 1} if phase == "decode" else {}
    return GraphFile(file.name, bound=caches_in_place(model), fixed=fixed)


def fill_weights(bundle: Path) -> bool:
    """Write random weights if a bundle has none; return whether its own are there."""
    file = bundle / WEIGHTS
    if file.exists():
        return True
    model = onnx.load(bundle / "model.cuda.decode.onnx", load_external_data=False)
    random = np.random.default_rng(0)
    with file.open("wb") as data:
        for tensor in model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if not place:
                continue
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            some = (0.02 * random.standard_normal(1 << 20, np.float32)).astype(dtype)
            data.seek(int(place["offset"]))
            data.write(np.resize(some, int(place["length"]) // dtype.itemsize).tobytes())
    return False


def verdicts(name: str, bundle: Path, runtime: str, limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield the results of each graph of a bundle in a runtime."""
    report = verify(bundle, runtimes=[runtime], limits=limits)
    for graph in dict.fromkeys(verdict.graph for verdict in report.verdicts):
        found = [verdict for verdict in report.verdicts if verdict.graph == graph]
        worst = largest(found, "worst")
        wrong = [verdict for verdict in found if verdict.status != "passed"]
        yield {
            "model": name, "step": graph, "passed": not wrong,
            "right": len(found) - len(wrong), "outputs": len(found),
            "worst": None if worst is None else finite(worst),
            "failed": [f"{v.case}, {v.output}: {v.message}" for v in wrong[:5]],
        }  # fmt: skip


def torch_model(folder: Path, dtype: str, sizes: tuple[int, int, int], device: str) -> Run:
    """Return a function that runs a step of transformers' model, by SDPA with a static cache.

    Args:
        folder: The folder of the config.
        dtype: The type of the model.
        sizes: B, L and P. With P 0, there is no cache.
        device: The device.
    """
    batch, query_len, past_len = sizes
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = _model_of(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        ids = torch.zeros(batch, query_len, dtype=torch.int64)
    cache = StaticCache(config=config, max_cache_len=past_len + query_len) if past_len else None
    # A step attends to all slots, used or not, and uses one more.
    keywords = {cache_name(model): cache, "use_cache": bool(cache), "logits_to_keep": 1}
    if cache:
        with torch.inference_mode():
            model(ids.expand(batch, past_len // 2), **keywords)

    def run() -> None:
        with torch.inference_mode():
            model(ids, **keywords)

    return run
