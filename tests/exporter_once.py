"""Cache of data that torch's exporter reads for each export, per process of the tests.

The data are the sources of 500 operators of onnxscript. Reading them takes an eighth of an export,
and the tests make hundreds of exports.
"""

from __future__ import annotations

import functools

from torch.onnx._internal.exporter._registration import ONNXRegistry

_read = ONNXRegistry.from_torchlib


def read_once() -> None:
    """Cache the data from here on in this process."""
    ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)


def _from_torchlib(**options: int) -> ONNXRegistry:
    # An export adds its own operators to what it was given.
    known, registry = _known(**options), ONNXRegistry()
    registry._opset_version = known.opset_version
    registry.functions = {name: list(made) for name, made in known.functions.items()}
    return registry


@functools.cache
def _known(**options: int) -> ONNXRegistry:
    return _read(**options)
