"""Arrays and tensors: the same bytes, bfloat16 included."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.tensorfile import numpy_dtype


def to_torch(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors of the same values."""
    return {name: _tensor(array) for name, array in arrays.items()}


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return arrays of the same values."""
    return {name: _array(tensor.detach().cpu()) for name, tensor in tensors.items()}


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # a type that torch does not know from numpy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    array: np.ndarray = tensor.numpy()
    return array


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by every name that they have."""
    found: dict[str, Tensor] = {}
    found.update(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found
