"""Reading of the tensors of one attention layer: checks, conversion, unpacking and our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attn_export.errors import WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.layouts import (
    ADDED_KEYS,
    BUFFERS,
    K_NORM,
    KV_UP,
    Q_NORM,
    QKV,
    pack_weights,
    split_packed,
)
from attn_export.weights.select_layer import LayerMatch
from attn_export.weights.shapes import (
    ExpectedTensor,
    NamedSizes,
    expected_tensors,
    relative_bias_name,
)
from attn_export.weights.source import Stored, TensorSource, bracketed, listed, shown

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of weights, by their names in safetensors files."""


def read_weights(
    source: TensorSource, match: LayerMatch, sizes: NamedSizes, *, norms_minus_one: bool
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Return the state dict of an `Attention`, our names of the tensors, and notes."""
    spec, names = sizes.spec, source.files
    if match.layout.latent != bool(spec.kv_latent_dim):
        raise WeightsError(
            f"{source.path} holds {match.shown} as {match.layout.name}, and kv_latent_dim of "
            f"{sizes.origin} is {spec.kv_latent_dim}; multi-head latent attention has one, others "
            "have not"
        )
    expected = expected_tensors(match, names, sizes)
    stored = source.describe([name for name in expected if name in names])
    transposed = _transposed_names(match, expected, stored)
    missing = {name: tensor.shape for name, tensor in expected.items() if name not in names}
    problems = [
        *(f"{shown(name)} {bracketed(shape)} is missing" for name, shape in missing.items()),
        *_wrong_tensors(expected, stored, transposed),
        *_left_over(source, match, expected),
        *_unpackable(match, expected, spec),
    ]
    if problems:
        raise WeightsError(
            f"{source.path} does not hold the attention of {sizes.origin}: "
            f"{listed(problems, '; ')}; change {sizes.origin}, or choose another --layer"
        )
    minus_one_names = {match.prefix + name for name in (Q_NORM[0], K_NORM[0]) if norms_minus_one}
    values, notes = _convert(source, stored, spec, minus_one_names)
    weights: dict[str, Tensor] = {}
    for name, tensor in values.items():
        tensor = tensor.T.contiguous() if name in transposed else tensor
        weights |= _unpack(tensor, expected[name].ours, match, spec)
    weights = pack_weights(weights) if spec.packed_qkv else weights
    ours = {name: tensor.ours for name, tensor in expected.items()}
    return {name: weights[name] for name in sorted(weights)}, ours, notes


def _transposed_names(
    match: LayerMatch, expected: Mapping[str, ExpectedTensor], stored: Mapping[str, Stored]
) -> set[str]:
    """Return the names of weights that are stored `[in, out]`, as by GPT-2's Conv1D."""
    packed = match.prefix + match.layout.weights[0]
    if not match.layout.conv1d or packed not in stored:
        return set()
    shape, linear = stored[packed].shape, expected[packed].shape
    # A shape that is neither is an error, whose message compares it with the likelier one.
    is_transposed = shape == linear[::-1] or (shape != linear and shape[:1] <= shape[1:])
    return {packed, match.prefix + match.layout.out_names[0]} if is_transposed else set()


def _wrong_tensors(
    expected: Mapping[str, ExpectedTensor], stored: Mapping[str, Stored], transposed: set[str]
) -> list[str]:
    """Return a message on each tensor of another shape or type than the spec requires."""
    problems = []
    for name, tensor in stored.items():
        shape = expected[name].shape[::-1] if name in transposed else expected[name].shape
        if tensor.shape != shape:
            problems.append(
                f"{shown(name)} is {bracketed(tensor.shape)}, expected {bracketed(shape)} "
                f"({expected[name].why})"
            )
        elif tensor.dtype not in DTYPES:
            problems.append(f"{shown(name)} is {tensor.dtype}, expected one of {', '.join(DTYPES)}")
    return problems


def _left_over(
    source: TensorSource, match: LayerMatch, expected: Mapping[str, ExpectedTensor]
) -> list[str]:
    """Return a message on each tensor of the layer that is not used."""
    ignored = {match.prefix + name for name in (*BUFFERS, *match.layout.others)}
    relative = relative_bias_name(match, source.files)
    of_layer = [n for n in source.files if n.startswith(match.prefix) or n == relative]
    unused = [name for name in of_layer if name not in expected and name not in ignored]
    return [f"{shown(name)} is left over" for name in unused]


def _unpackable(
    match: LayerMatch, expected: Mapping[str, ExpectedTensor], spec: AttentionSpec
) -> list[str]:
    """Return a message on each conflict of the spec with a layout that packs q, k and v."""
    layout, problems = match.layout, []
    weight, bias = (match.prefix + names[0] for names in (layout.weights, layout.biases))
    widths = {spec.embed_dim, spec.kdim, spec.vdim}
    if len(layout.weights) == 1 and len(widths) > 1:
        problems.append(
            f"{shown(weight)} packs q, k and v of one width, embed_dim is {spec.embed_dim}, kdim "
            f"{spec.kdim}, vdim {spec.vdim}"
        )
    lacking = [side for side in QKV if not spec.has_bias(side)]
    if len(layout.biases) == 1 and bias in expected and lacking:
        problems.append(f"{shown(bias)} has one of {', '.join(lacking)}, bias is {spec.bias!r}")
    return problems


def _convert(
    source: TensorSource,
    stored: Mapping[str, Stored],
    spec: AttentionSpec,
    minus_one_names: set[str],
) -> tuple[dict[str, Tensor], list[str]]:
    """Return copies of the tensors in the type of the spec, 1 added to some, and notes."""
    import torch

    target: torch.dtype = getattr(torch, spec.dtype)
    values = {}
    for name, tensor in source.read(stored).items():
        if name in minus_one_names:
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
    notes = _type_notes({DTYPES[tensor.dtype] for tensor in stored.values()}, spec.dtype)
    if minus_one_names & values.keys():
        notes.append("q_norm and k_norm are stored minus 1, as in Gemma; 1 was added")
    return values, notes


def _type_notes(dtypes: set[str], target: str) -> list[str]:
    import torch

    info = {name: torch.finfo(getattr(torch, name)) for name in (*dtypes, target)}
    notes = []
    for name in sorted(dtypes - {target}):
        exact = info[name].eps >= info[target].eps and info[name].max <= info[target].max
        how = "widened, which is exact" if exact else "rounded"
        notes.append(f"{name} weights were converted to {target}: {how}")
    return notes


def _unpack(tensor: Tensor, ours: str, match: LayerMatch, spec: AttentionSpec) -> dict[str, Tensor]:
    """Return a tensor by our name, or the tensors that it packs."""
    if ours.startswith(ADDED_KEYS):
        return {ours: tensor.reshape(spec.num_kv_heads, -1)}
    if ours == KV_UP:
        heads = tensor.unflatten(0, (spec.num_heads, -1))  # [H, N + Dv, C]
        sizes = (spec.head_dim - spec.rotary_dim, spec.v_head_dim)
        key, value = (part.contiguous() for part in heads.split(sizes, dim=1))
        return {"latent.key_up": key, "latent.value_up": value}
    if ours:
        return {ours: tensor}
    suffix = "bias" if tensor.dim() == 1 else "weight"
    parts = split_packed(tensor, spec, match.layout.packing)
    return {f"{side}_proj.{suffix}": part for side, part in zip(QKV, parts, strict=True)}
