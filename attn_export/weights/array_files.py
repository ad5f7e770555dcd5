"""Named arrays in untrusted .npz and .safetensors files, and scales of a cache in such files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.errors import WeightsError, one_line
from attn_export.spec.field_rows import HUGE
from attn_export.weights.npz_files import check_names, read_npz
from attn_export.weights.source import bracketed, open_source

# -- named arrays in .npz and .safetensors files ------------------------------------------------

NPZ, SAFETENSORS = ".npz", ".safetensors"


def read_arrays(path: Path, names: Sequence[str], max_bytes: int) -> dict[str, Tensor]:
    """Return the arrays of a file, in the types in which they are stored.

    `max_bytes`: The largest size of the file, and of each array in it, in bytes.
    """
    readers = {NPZ: _npz, SAFETENSORS: _safetensors}
    if path.suffix not in readers:
        raise WeightsError(f"{path} must end in {NPZ} or {SAFETENSORS}")
    try:
        arrays = readers[path.suffix](path, names, max_bytes)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    except WeightsError:
        raise
    except Exception as error:  # a file may hold anything
        raise WeightsError(f"{path} is not a {path.suffix} file: {one_line(error)}") from error
    if not arrays:
        raise WeightsError(f"{path} holds no arrays; it may hold {', '.join(names)}")
    return arrays


def _npz(path: Path, names: Sequence[str], max_bytes: int) -> dict[str, Tensor]:
    arrays = read_npz(path, names, max_bytes)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _safetensors(path: Path, names: Sequence[str], max_bytes: int) -> dict[str, Tensor]:
    source = open_source(path)
    check_names(path, source.files, names)
    # The format has no compression: no array takes more memory than its file.
    size = sum(file.stat().st_size for file in set(source.files.values()))
    if size > max_bytes:
        raise WeightsError(f"{path} has {size} bytes, and {max_bytes} is the most")
    return {name: tensor.clone() for name, tensor in source.read(source.files).items()}


# -- scales of a cache of integers --------------------------------------------------------------

FILE = "kv_scales.npz"
"""The name of the file in a bundle."""

NAMES = ("k_scale", "v_scale")

_MAX_BYTES = 64 * 2**20
"""The largest size of such a file in bytes: a scale for each of 2^20 channels takes 8 MiB."""


def read_scales(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scales from a file, reshaped to the shapes of a module's scales.

    `path`: A .npz or .safetensors file with `k_scale` and `v_scale`, float32: scalars or `[1]`, or
    `[Hkv, D]` or `[Hkv, 1, D]` for scales by channel.
    """
    arrays = read_arrays(path, NAMES, _MAX_BYTES)
    return {name: _check_scale(path, name, arrays, like[name]) for name in NAMES}


def _check_scale(path: Path, name: str, arrays: Mapping[str, Tensor], like: Tensor) -> Tensor:
    if name not in arrays:
        raise WeightsError(f"{path} has no {name}; it must hold {' and '.join(NAMES)}")
    scale = arrays[name]
    if scale.dtype != torch.float32:
        dtype = str(scale.dtype).removeprefix("torch.")
        raise WeightsError(f"{path}: {name} is {dtype}; store scales as float32")
    shapes = [tuple(like.shape), (like.shape[0], like.shape[-1]) if like.dim() else (1,)]
    if tuple(scale.shape) not in shapes:
        expected = " or ".join(map(bracketed, shapes))
        kv_scale = "per-channel" if like.dim() else "per-tensor"
        raise WeightsError(
            f"{path}: {name} has the shape {bracketed(scale.shape)}; with kv_scale = {kv_scale!r} "
            f"it must be {expected}"
        )
    wrong = scale[~((scale >= 1 / HUGE) & (scale <= HUGE))]
    if wrong.numel():
        raise WeightsError(
            f"{path}: {name} holds {wrong[0].item():g}; a scale is a number from {1 / HUGE:g} to "
            f"{HUGE:g}"
        )
    return scale.reshape(like.shape)


def write_scales(folder: Path, scales: Mapping[str, Tensor]) -> None:
    """Write the scales of a module to a file that `read_scales` can read."""
    arrays: dict[str, Any] = {name: scales[name].numpy() for name in NAMES}
    np.savez(folder / FILE, **arrays)
