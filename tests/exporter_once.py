"""Cache of data that torch's exporter would read for each export, in each test process.

The data are the sources of 500 operators of onnxscript, and PyTorch's list of composite operators,
which an export asks for 56 times. Each takes an eighth of an export, and the tests make hundreds.
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

_read = ONNXRegistry.from_torchlib
_any_py_impl = OperatorBase.py_impl


def read_once() -> None:
    """Cache the data from here on in this process, and leave out a cache that only costs time."""
    dynamo_config.fake_tensor_cache_enabled = False  # as `export` does
    ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)
    OperatorBase.py_impl = _py_impl
    # The tests define no composite operators, which would be missing in it.
    export_utils._materialize_cpp_cia_ops = functools.cache(export_utils._materialize_cpp_cia_ops)


def _py_impl(self: Any, key: Any) -> Callable[[Any], Any]:
    """Return what sets the kernel of an operator for a key, as `OperatorBase.py_impl` does.

    That one evaluates its annotations at each of ten thousand calls for an export.
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
    # An export adds its own operators to what it was given.
    known, registry = _known(**options), ONNXRegistry()
    registry._opset_version = known.opset_version
    registry.functions = {name: list(made) for name, made in known.functions.items()}
    return registry


@functools.cache
def _known(**options: int) -> ONNXRegistry:
    return _read(**options)


def warm_up() -> None:
    """Cache the data, and export something small: the first export imports as much as torch."""
    torch.set_num_threads(1)  # its threads would be missing in processes that are forked
    read_once()
    with torch.random.fork_rng():
        export(Subject.from_spec(AttentionSpec(embed_dim=8, num_heads=1)))
