"""Checkpoints in the layouts of real models, with random weights.

Packed layouts are written one row at a time, as their models' code reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attn_export.attention.module import Attention
from attn_export.spec import AttentionSpec

Weights = dict[str, Tensor]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
Writer = Callable[[AttentionSpec, Weights], Weights]


def spec_of(**changes: Any) -> AttentionSpec:
    """Return a spec of E 24, H 6, Hkv 2, D 5, whose sizes are all distinguishable."""
    values = {"embed_dim": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "bias": "none"}
    return AttentionSpec.from_dict(values | changes)


def random_weights(spec: AttentionSpec, seed: int = 0) -> Weights:
    """Return random values for every weight of an `Attention`."""
    generator = torch.Generator().manual_seed(seed)
    state = Attention(spec).state_dict()
    return {name: torch.randn(t.shape, generator=generator) for name, t in state.items()}


def renamed(q: str, k: str, v: str, out: str) -> Writer:
    """Return a layout that only renames the four modules."""
    theirs = {"q_proj": q, "k_proj": k, "v_proj": v, "out_proj": out}

    def write(spec: AttentionSpec, weights: Weights) -> Weights:
        stored = {}
        for name, tensor in weights.items():
            module, _, part = name.rpartition(".")
            stored[f"{theirs.get(module, module)}.{part}".lstrip(".")] = tensor
        return stored

    return write


def packed(name: str, out: str, order: Callable[[AttentionSpec], list[tuple[str, int]]]) -> Writer:
    """Return a layout of one tensor for q, k and v; `order` lists the owners of its rows."""

    def write(spec: AttentionSpec, weights: Weights) -> Weights:
        stored = {n: t for n, t in weights.items() if not n.startswith(PROJECTIONS)}
        for part in ("weight", "bias"):
            if f"q_proj.{part}" in weights:
                rows = [weights[f"{side}_proj.{part}"][row] for side, row in order(spec)]
                stored[f"{name}.{part}"] = torch.stack(rows)
            if f"out_proj.{part}" in weights:
                stored[f"{out}.{part}"] = weights[f"out_proj.{part}"]
        return stored

    return write


def one_after_another(spec: AttentionSpec) -> list[tuple[str, int]]:
    """Return all rows of q, then k, then v (Phi-3, GPT-2, torch)."""
    order = []
    for side, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        order += [(side, row) for row in range(heads * spec.head_dim)]
    return order


def head_by_head(spec: AttentionSpec) -> list[tuple[str, int]]:
    """Return rows as [H, 3, D]: q, k and v of each head (GPT-NeoX, BLOOM, old Falcon)."""
    order = []
    for head in range(spec.num_heads):
        for side in ("q", "k", "v"):
            order += [(side, head * spec.head_dim + d) for d in range(spec.head_dim)]
    return order


def group_by_group(spec: AttentionSpec) -> list[tuple[str, int]]:
    """Return the query heads of a K/V head, then its key, then its value (Falcon)."""
    order, D = [], spec.head_dim
    per_group = spec.num_heads // spec.num_kv_heads
    for group in range(spec.num_kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            order += [("q", head * D + d) for d in range(D)]
        for side in ("k", "v"):
            order += [(side, group * D + d) for d in range(D)]
    return order


def conv1d(write: Writer) -> Writer:
    """Store weights as [in, out], as GPT-2's Conv1D does."""

    def turned(spec: AttentionSpec, weights: Weights) -> Weights:
        stored = write(spec, weights)
        return {
            name: torch.stack([t[:, column] for column in range(t.shape[1])]) if t.dim() == 2 else t
            for name, t in stored.items()
        }

    return turned


def less_one(write: Writer) -> Writer:
    """Store norms minus 1, since Gemma's RMSNorm multiplies by 1 + weight."""

    def lowered(spec: AttentionSpec, weights: Weights) -> Weights:
        stored = write(spec, weights)
        return {name: t - 1 if "_norm" in name else t for name, t in stored.items()}

    return lowered


def torch_names(write: Writer) -> Writer:
    """Remove the dot of ``in_proj_weight``, as torch.nn.MultiheadAttention does."""

    def named(spec: AttentionSpec, weights: Weights) -> Weights:
        stored = write(spec, weights)
        return {name.replace("in_proj.", "in_proj_"): t for name, t in stored.items()}

    return named


LLAMA = renamed("q_proj", "k_proj", "v_proj", "o_proj")
OUT_PROJ = renamed("q_proj", "k_proj", "v_proj", "out_proj")
PHI3 = packed("qkv_proj", "o_proj", one_after_another)
NEOX = packed("query_key_value", "dense", head_by_head)
FALCON = packed("query_key_value", "dense", group_by_group)
GPT2 = conv1d(packed("c_attn", "c_proj", one_after_another))
NANOGPT = packed("c_attn", "c_proj", one_after_another)
BERT = renamed("self.query", "self.key", "self.value", "output.dense")
MODERN = packed("Wqkv", "Wo", one_after_another)
VIT = renamed("attention.query", "attention.key", "attention.value", "output.dense")
T5 = renamed("q", "k", "v", "o")
TORCH = torch_names(packed("in_proj", "out_proj", one_after_another))
GEMMA3 = less_one(LLAMA)


def with_added_keys(write: Writer) -> Writer:
    """Store the added key and value as [1, 1, E], as torch.nn.MultiheadAttention does."""

    def added(spec: AttentionSpec, weights: Weights) -> Weights:
        own = {name: tensor for name, tensor in weights.items() if "added_keys" not in name}
        for name in ("bias_k", "bias_v"):
            heads = weights[f"added_keys.{name}"]
            own[name] = torch.stack([heads[h, d] for h in range(heads.shape[0])
                                     for d in range(heads.shape[1])])[None, None]  # fmt: skip
        return write(spec, own)

    return added


def t5(spec: AttentionSpec, weights: Weights) -> Weights:
    """Store T5 without our folder for the relative bias."""
    stored = T5(spec, weights)
    return {name.replace("score_bias.", ""): tensor for name, tensor in stored.items()}


def under(prefix: str, tensors: Weights) -> Weights:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def save(folder: Path, tensors: Weights, config: dict[str, Any] | None = None) -> Path:
    """Write model.safetensors, and config.json if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    # A copy of each: the library refuses tensors that share memory.
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def save_sharded(folder: Path, shards: dict[str, Weights]) -> Path:
    """Write shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for file, tensors in shards.items():
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def equal(ours: Weights, theirs: Weights) -> bool:
    """Return whether names and bits are equal."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].view(torch.int32), theirs[name].view(torch.int32)) for name in ours
    )
