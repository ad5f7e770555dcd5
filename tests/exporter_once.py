"""Savings for processes that export often: cached data of the exporter.

The data are the sources of 500 operators of onnxscript, and PyTorch's list of composite operators,
which an export reads 56 times. Each takes an eighth of the time of an export, and the tests make
hundreds of exports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._export.utils as export_utils
from torch._ops import OperatorBase
from torch.onnx._internal.exporter._registration import ONNXRegistry

from attn_export import AttentionSpec, Subject
from attn_export.export.export import export
from attn_export.system_info import reuse_memory

_read = ONNXRegistry.from_torchlib
_any_py_impl = OperatorBase.py_impl


def read_once() -> None:
    """Enable the cache in this process, and disable a cache of torch that saves no time."""
    dynamo_config.fake_tensor_cache_enabled = False  # as `export` does
    ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)
    OperatorBase.py_impl = _py_impl
    # The tests define no composite operators, which a cached list would lack.
    export_utils._materialize_cpp_cia_ops = functools.cache(export_utils._materialize_cpp_cia_ops)


def _py_impl(self: Any, key: Any) -> Callable[[Any], Any]:
    """Return a decorator that sets the kernel of an operator, as `OperatorBase.py_impl` does.

    The original evaluates its annotations at each call, of which an export makes ten thousand.
    """
    if not isinstance(key, torch._C.DispatchKey) or key == torch._C.DispatchKey.Python:
        return _any_py_impl(self, key)

    def set_kernel(kernel: Any) -> Any:
        if key in self.py_kernels:
            raise RuntimeError(f"{self.name()} has a kernel for {key}")
        self.py_kernels[key] = kernel
        self._dispatch_cache.clear()
        return kernel

    return set_kernel


def _from_torchlib(**options: int) -> ONNXRegistry:
    # A copy, because an export adds operators to its registry.
    cached, registry = _cached(**options), ONNXRegistry()
    registry._opset_version = cached.opset_version
    registry.functions = {name: list(overloads) for name, overloads in cached.functions.items()}
    return registry


@functools.cache
def _cached(**options: int) -> ONNXRegistry:
    return _read(**options)


def warm_up() -> None:
    """Fill the cache by a small export, which also imports the many modules of the exporter."""
    torch.set_num_threads(1)  # forked processes would lack the threads of a pool
    read_once()
    reuse_memory()
    with torch.random.fork_rng():
        export(Subject.from_spec(AttentionSpec(embed_dim=8, num_heads=1)))
