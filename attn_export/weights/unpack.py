"""The tensors of one attention, checked, read and unpacked to our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import PROJECTIONS
from attn_export.weights.layouts import (
    ADDED_KEYS,
    BUFFERS,
    K_NORM,
    KV_UP,
    PARTS,
    Q_NORM,
    as_packed,
    split_packed,
)
from attn_export.weights.quantised_source import QuantisedSource
from attn_export.weights.select_layer import LayerMatch
from attn_export.weights.shapes import (
    ExpectedTensor,
    Sizes,
    relative_bias_name,
    wanted_tensors,
)
from attn_export.weights.source import Stored, TensorSource, bracketed, listed, shown

FLOATS = ("F64", "F32", "F16", "BF16")
WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_weights(
    source: TensorSource, found: LayerMatch, sizes: Sizes, *, less_one: bool
) -> tuple[dict[str, Tensor], dict[str, QuantisedWeight], list[str]]:
    """Return our weights of one attention, the integers of some of them, and notes for the reader.

    Args:
        source: The checkpoint.
        found: The attention.
        sizes: Its spec, and where that is from.
        less_one: Whether the weights of head norms are stored minus 1, as Gemma does.

    Raises:
        WeightsError: If tensors are missing, left over, of another shape or type, or not finite.
    """
    spec, names = sizes.spec, source.files
    if found.layout.latent != bool(spec.kv_latent_dim):
        raise WeightsError(
            f"{source.path} holds {found.shown} as {found.layout.name}, and kv_latent_dim of "
            f"{sizes.origin} is {spec.kv_latent_dim}; multi-head latent attention has one, others "
            "have not"
        )
    wanted = wanted_tensors(found, names, sizes)
    there = {name: tensor for name, tensor in wanted.items() if name in names}
    stored = source.describe(there)
    turned = _is_conv1d(found, wanted, stored)
    problems = [
        *_missing(wanted, source),
        *_misfits(wanted, stored, turned),
        *_left_over(source, found, wanted),
        *_unpackable(found, wanted, spec),
    ]
    if problems:
        raise WeightsError(
            f"{source.path} does not hold the attention of {sizes.origin}: "
            f"{listed(problems, '; ')}; change {sizes.origin}, or choose another --layer"
        )
    raised = {found.prefix + name for name in (Q_NORM[0], K_NORM[0]) if less_one}
    integers = _integers(source, wanted, spec)
    values, notes = _converted(source, stored, spec, raised)
    weights: dict[str, Tensor] = {}
    for name, tensor in values.items():
        tensor = tensor.T.contiguous() if name in turned else tensor
        weights |= _unpacked(tensor, wanted[name].ours, found, spec)
    weights = as_packed(weights) if spec.packed_qkv else weights
    return {name: weights[name] for name in sorted(weights)}, integers, notes


def _integers(
    source: TensorSource, wanted: Mapping[str, ExpectedTensor], spec: AttentionSpec
) -> dict[str, QuantisedWeight]:
    """Return the integers of weights that the checkpoint stores so, by our names."""
    if not isinstance(source, QuantisedSource):
        return {}
    found = {}
    for name, tensor in wanted.items():
        if not source.is_packed(name):
            continue
        if tensor.ours not in SEPARATE or spec.packed_qkv:
            raise WeightsError(
                f"{source.path}: {shown(name)} is quantised and holds several projections in one, "
                "which is not supported; give a checkpoint in float"
            )
        found[tensor.ours] = source.integers(name)
    return found


SEPARATE: Final = tuple(f"{name}_proj.weight" for name in PROJECTIONS)
"""Our weights that a checkpoint may store as integers."""


def _is_conv1d(
    found: LayerMatch, wanted: Mapping[str, ExpectedTensor], stored: Mapping[str, Stored]
) -> set[str]:
    """Return the weights that are stored `[in, out]`: all of them if the packed one is."""
    packed = found.prefix + found.layout.weights[0]
    if not found.layout.conv1d or packed not in stored:
        return set()
    shape, linear = stored[packed].shape, wanted[packed].shape
    is_linear = shape == linear and shape != linear[::-1]
    if is_linear or (shape != linear[::-1] and shape[:1] > shape[1:]):
        return set()
    return {packed, found.prefix + found.layout.out[0]}


def _missing(wanted: Mapping[str, ExpectedTensor], source: TensorSource) -> list[str]:
    return [
        f"{shown(name)} {bracketed(tensor.shape)} is missing"
        for name, tensor in wanted.items()
        if name not in source.files
    ]


def _misfits(
    wanted: Mapping[str, ExpectedTensor], stored: Mapping[str, Stored], turned: set[str]
) -> list[str]:
    """Return the tensors of another shape or type than the spec needs."""
    problems = []
    for name, tensor in stored.items():
        shape = wanted[name].shape[::-1] if name in turned else wanted[name].shape
        if tensor.shape != shape:
            problems.append(
                f"{shown(name)} is {bracketed(tensor.shape)}, expected {bracketed(shape)} "
                f"({wanted[name].why})"
            )
        elif tensor.dtype not in FLOATS:
            problems.append(f"{shown(name)} is {tensor.dtype}, expected one of {', '.join(FLOATS)}")
    return problems


def _left_over(
    source: TensorSource, found: LayerMatch, wanted: Mapping[str, ExpectedTensor]
) -> list[str]:
    """Return unused tensors of this attention, and parts of a packed bias."""
    known = {found.prefix + name for name in (*BUFFERS, *found.layout.others)}
    relative = relative_bias_name(found, source.files)
    own = [name for name in source.files if name.startswith(found.prefix) or name == relative]
    return [
        f"{shown(name)} is left over" for name in own if name not in wanted and name not in known
    ]


def _unpackable(
    found: LayerMatch, wanted: Mapping[str, ExpectedTensor], spec: AttentionSpec
) -> list[str]:
    """Return the conflicts of a spec with a layout that packs q, k and v."""
    layout, problems = found.layout, []
    weight, bias = (found.prefix + names[0] for names in (layout.weights, layout.biases))
    widths = {spec.embed_dim, spec.kdim, spec.vdim}
    if len(layout.weights) == 1 and len(widths) > 1:
        problems.append(
            f"{shown(weight)} packs q, k and v of one width, embed_dim is {spec.embed_dim}, kdim "
            f"{spec.kdim}, vdim {spec.vdim}"
        )
    lacking = [side for side in PARTS if not spec.has_bias(side)]
    if len(layout.biases) == 1 and bias in wanted and lacking:
        problems.append(f"{shown(bias)} has one of {', '.join(lacking)}, bias is {spec.bias!r}")
    return problems


def _converted(
    source: TensorSource, stored: Mapping[str, Stored], spec: AttentionSpec, raised: set[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in the type of the spec, copied out of the file; some of them plus 1."""
    target: torch.dtype = getattr(torch, spec.dtype)
    values = {}
    for name, tensor in source.read(stored).items():
        if name in raised:
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1
        values[name] = tensor.to(target, copy=True).contiguous()
    broken = {name: int((~tensor.isfinite()).sum()) for name, tensor in values.items()}
    problems = [
        f"{shown(name)} has {count} of {values[name].numel()} values that are NaN or infinite in "
        f"{spec.dtype}"
        for name, count in broken.items()
        if count
    ]
    if problems:
        raise WeightsError(f"{source.path}: {listed(problems, '; ')}; give a sound checkpoint")
    notes = _type_notes({WORDS[tensor.dtype] for tensor in stored.values()}, spec.dtype)
    if raised & values.keys():
        notes.append("q_norm and k_norm are stored minus 1, as in Gemma; 1 was added")
    return values, notes


def _type_notes(found: set[str], target: str) -> list[str]:
    info = {name: torch.finfo(getattr(torch, name)) for name in (*found, target)}
    notes = []
    for name in sorted(found - {target}):
        exact = info[name].eps >= info[target].eps and info[name].max <= info[target].max
        how = "widened, which is exact" if exact else "rounded"
        notes.append(f"{name} weights were converted to {target}: {how}")
    return notes


def _unpacked(
    tensor: Tensor, ours: str, found: LayerMatch, spec: AttentionSpec
) -> dict[str, Tensor]:
    """Return one tensor, or the three that it packs."""
    if ours.startswith(ADDED_KEYS):
        return {ours: tensor.reshape(spec.num_kv_heads, -1)}
    if ours == KV_UP:
        heads = tensor.unflatten(0, (spec.num_heads, -1))  # [H, N + Dv, C]
        sizes = (spec.head_dim - spec.rotary_dim, spec.v_head_dim)
        key, value = (part.contiguous() for part in heads.split(sizes, dim=1))
        return {"latent.key_up": key, "latent.value_up": value}
    if ours:
        return {ours: tensor}
    kind = "bias" if tensor.dim() == 1 else "weight"
    parts = split_packed(tensor, spec, found.layout.packing)
    return {f"{side}_proj.{kind}": part for side, part in zip(PARTS, parts, strict=True)}
