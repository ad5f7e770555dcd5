"""Scales of a cache of integers from the user: from a file, or calibrated on hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised import calibrate_cache, scale_rule
from attn_export.attention.quantised_cache import CacheScales
from attn_export.errors import AttnExportError, ExportError, WeightsError, counted, one_line
from attn_export.export.subject_checks import dtype_of
from attn_export.source_location import line_of
from attn_export.spec import AttentionSpec
from attn_export.spec.field_rows import LARGEST
from attn_export.spec.fields import OF_DATA, OF_FILE, SEED
from attn_export.spec.low_precision import KV_RANGES

Calibration = Path | str | Callable[[], Iterable[Mapping[str, Any]]]
"""Hidden states: a file, or a function that yields batches of them, by the names of inputs."""

_MOST_BYTES = 2**30
"""The largest size of a file of hidden states in bytes."""


def set_user_scales(
    module: Attention, scales_file: Path | str | None = None, calibrate: Calibration | None = None
) -> tuple[str, ...]:
    """Set the scales of a module's cache to those of the user.

    `module`: The module, changed in place. With neither a file nor hidden states its scales stay
    those of random tokens.

    Returns:
        A note for the report on these scales; none if the user gave none.
    """
    spec = module.spec
    if scales_file is not None and calibrate is not None:
        raise WeightsError(f"kv_scales {scales_file} and calibrate are both given; choose one")
    if scales_file is None and calibrate is None:
        if spec.kv_scales_from != SEED:
            raise WeightsError(
                f"kv_scales_from = {spec.kv_scales_from!r} in the spec, and no scales are given; "
                "name their file, kv_scales.npz of the bundle, by --kv-scales"
            )
        return ()
    option = "kv_scales" if calibrate is None else "calibrate"
    if spec.kv_dtype not in KV_RANGES:
        raise WeightsError(
            f"{option} with kv_dtype = {spec.kv_dtype!r}; set kv_dtype to int8 or int4"
        )
    if not isinstance(module.kv_scales, CacheScales):
        raise WeightsError(
            f"{option} with kv_scale = {spec.kv_scale!r}: each token has scales of its own; leave "
            f"{option} out, or choose another kv_scale"
        )
    if scales_file is not None:
        from attn_export.weights.array_files import read_scales  # few builds read one

        path, buffers = Path(scales_file), dict(module.kv_scales.named_buffers())
        for name, scale in read_scales(path, buffers).items():
            buffers[name].copy_(scale)
        module.spec = dataclasses.replace(spec, kv_scales_from=OF_FILE)
        return (f"the scales of the {spec.kv_dtype} cache are those of {path.name}",)
    assert calibrate is not None
    return _calibrate(module, calibrate)


def _calibrate(module: Attention, calibrate: Calibration) -> tuple[str, ...]:
    spec = module.spec
    name = "a function" if callable(calibrate) else Path(calibrate).name
    batches = [_check_batch(batch, spec, name) for batch in _batches(calibrate, spec)]
    tokens = sum(batch["query"].shape[:2].numel() for batch in batches)
    if not tokens:
        raise WeightsError(f"the hidden states of {name} have no tokens; give some")
    calibrate_cache(module, batches)
    module.spec = dataclasses.replace(spec, kv_scales_from=OF_DATA)
    return (
        f"the scales of the {spec.kv_dtype} cache are calibrated: they are {scale_rule(spec)} of "
        f"{counted(tokens, 'token')} of {name}; larger values are clipped",
    )


def _batches(calibrate: Calibration, spec: AttentionSpec) -> list[Mapping[str, Any]]:
    """Return the batches of a file, or of a function; its errors name the line."""
    if not callable(calibrate):
        from attn_export.weights.array_files import read_arrays

        return [read_arrays(Path(calibrate), _names(spec), _MOST_BYTES)]
    try:
        return list(calibrate())
    except AttnExportError:
        raise
    except Exception as error:
        where = line_of(error)
        raise ExportError(
            f"calibrate() raised{f' in {where}' if where else ''}: {one_line(error)}"
        ) from error


def _names(spec: AttentionSpec) -> list[str]:
    return ["query", *(["position_ids"] if spec.position_ids else [])]


def _check_batch(batch: Mapping[str, Any], spec: AttentionSpec, name: str) -> dict[str, Tensor]:
    """Return the tensors `query [B, L, E]` and, if the spec has them, `position_ids [B, L]`."""
    if not isinstance(batch, Mapping) or "query" not in batch or {*batch} - {*_names(spec)}:
        shown = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise WeightsError(f"{name} gives {shown}; hidden states are {', '.join(_names(spec))}")
    try:
        tensors = {key: torch.as_tensor(array).detach().cpu() for key, array in batch.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{name} gives what is not an array: {one_line(error)}") from error
    query = tensors["query"]
    if query.dim() != 3 or query.shape[2] != spec.embed_dim or not query.is_floating_point():
        raise WeightsError(
            f"query of {name} is {dtype_of(query)} {list(query.shape)}; it must be floating "
            f"point, [B, L, {spec.embed_dim}]"
        )
    tensors["query"] = query.float()
    if not tensors["query"].isfinite().all():
        raise WeightsError(f"query of {name} holds NaN, or an infinity; leave such tokens out")
    if "position_ids" in tensors:
        tensors["position_ids"] = _check_positions(tensors["position_ids"], query, name)
    return tensors


def _check_positions(positions: Tensor, query: Tensor, name: str) -> Tensor:
    is_whole = not positions.is_floating_point() and positions.dtype != torch.bool
    if not is_whole or positions.shape != query.shape[:2]:
        raise WeightsError(
            f"position_ids of {name} are {dtype_of(positions)} {list(positions.shape)}; they have "
            f"to be integers, {list(query.shape[:2])}"
        )
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < LARGEST:
        raise WeightsError(f"position_ids of {name} must be from 0 to {LARGEST - 1}")
    return positions.long()


def write_module_scales(folder: Path, module: nn.Module) -> None:
    """Write the scales of a module's cache to a file from which it can be built again."""
    from attn_export.weights.array_files import write_scales

    scales = module.get_submodule("kv_scales").named_buffers()
    write_scales(folder, {name: scale for name, scale in scales if name != "nibbles"})
