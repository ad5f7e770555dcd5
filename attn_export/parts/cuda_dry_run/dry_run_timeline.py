"""The record of the stand-in libraries, assigned to the nodes whose runs caused its events."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import printable
from attn_export.parts.cuda_dry_run.dry_run_results import Event
from attn_export.runtimes.engines.ort_cpu import dtype_name
from attn_export.tensorfile import numpy_dtype

# -- readable names of kernels, and kinds of attention ------------------------------------------

_UNFUSED = "unfused: products and softmax"

ATTENTION: Mapping[str, str] = {
    r"grp\d+\w*::kernel_mha\b|\bkernel_mha\b": "XQA",
    r"\bflash_fwd_splitkv_kernel\b": "flash attention, split K/V",
    r"\bflash_fwd_kernel\b|\bflash_fprop\w*": "flash attention",
    r"\blean_fwd_kernel\b": "lean attention",
    r"\battention_kernel_batched_impl\w*": "CUTLASS memory-efficient",
    r"\bmasked_multihead_attention_kernel\b": "decoder masked attention",
    r"\bfmha_\w+": "TensorRT fused attention",
}
"""Regular expressions for the names of fused attention kernels, with the kind of attention."""

SOFTMAX = re.compile(r"[Ss]oft[Mm]ax|softmax_warp_forward")
"""A regular expression for the names of softmax kernels, which mean attention that is not fused."""

COPIES = re.compile(
    r"\bUngroup\w*|ConcatNewToPastKV|ConcatTensorToTensor|ConcatPastToPresent|ConcatKV"
    r"|AppendPastPresent|CopyKVCache"
)
"""A regular expression for the names of kernels that copy past keys and values, or repeat them for
each query head."""

_NAMESPACES = re.compile(
    r"\b(?:onnxruntime|contrib|cuda|attention_softmax|flash|cutlass|detail|std)::"
    r"|\(anonymous namespace\)::"
)


def readable(symbol: str) -> str:
    """Return the name of a kernel without types, arguments and common namespaces."""
    name = _remove_template_arguments(_demangled(symbol))
    name = _NAMESPACES.sub("", name.replace("(anonymous namespace)::", ""))
    name = name.partition("(")[0].strip()
    return name.removeprefix("void ").strip() or symbol[:80]


@functools.cache
def _demangled(symbol: str) -> str:
    """Return the declaration of a mangled C++ symbol; other symbols unchanged."""
    if not symbol.startswith("_Z"):
        return symbol
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int(0)
    result = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not result:
        return symbol
    text = ctypes.string_at(result).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(result))
    return text


def _remove_template_arguments(text: str) -> str:
    """Return a declaration without the text in angle brackets."""
    kept, depth = [], 0
    for char in text:
        if char == "<":
            depth += 1
        elif char == ">" and depth:
            depth -= 1
        elif not depth:
            kept.append(char)
    return "".join(kept)


def kinds_of_attention(names: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of attention of kernels, without repetition, by their readable names."""
    names = list(names)
    kinds = [
        kind for name in names for pattern, kind in ATTENTION.items() if re.search(pattern, name)
    ]
    if not kinds and any(SOFTMAX.search(name) for name in names):
        kinds = [_UNFUSED]
    return tuple(dict.fromkeys(kinds))


def copies_of_cache(names: Iterable[str]) -> dict[str, int]:
    """Return the number of launches of each kernel that copies or repeats keys and values."""
    return dict(Counter(name for name in names if COPIES.search(name)))


# -- the events of a step -----------------------------------------------------------------------


KEPT = ("launch", "library", "to device", "to host", "on device", "fill", "wait")
"""The kinds of recorded events that an observation keeps."""

_MOST_EVENTS = 20_000
"""The largest number of events of a step that an observation keeps."""

TIMED = "_kernel_time"
"""The suffix of the profiler's name for the run of a node."""

_DEEPEST = 1000
"""The number of preceding spans among which the span of an enclosing node is searched."""

_ProfiledTensor = tuple[str, Sequence[int]]
"""The dtype of a tensor, in the words of ONNX Runtime's profiler, and its shape."""


@dataclasses.dataclass(frozen=True)
class _Span:
    """The time span of the run of a node, in nanoseconds, with the node's inputs and outputs."""

    start: int
    end: int
    node: str
    inputs: Sequence[_ProfiledTensor] = ()
    outputs: Sequence[_ProfiledTensor] = ()


_NO_NODE = _Span(0, 0, "")


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """An event in the record of the stand-in libraries.

    Attributes:
        time: The time in nanoseconds, by the clock of ONNX Runtime's profiler.
        kind: The kind of the event, as in `Event`, or ``"malloc"`` or ``"free"``.
    """

    time: int
    kind: str
    bytes: int
    name: str


def read_record(path: Path, start: int = 0, end: int | None = None) -> list[_Recorded]:
    """Return the events recorded between two positions in the file."""
    text = path.read_bytes()[start:end].decode(errors="replace")
    lines = [line.split("\t") for line in text.splitlines()]
    return [_Recorded(int(time), kind, int(size), name) for time, kind, size, name in lines]


def peak_bytes(events: Sequence[_Recorded], before: Sequence[_Recorded] = ()) -> int:
    """Return the largest device memory in bytes that was allocated at once during some events."""
    most = used = sum(map(_allocated, before))
    for event in events:
        used += _allocated(event)
        most = max(most, used)
    return most


def _allocated(event: _Recorded) -> int:
    return event.bytes * {"malloc": 1, "free": -1}.get(event.kind, 0)


def events_of_step(
    events: Sequence[_Recorded], profile: Sequence[Mapping[str, Any]], started: int
) -> tuple[Event, ...]:
    """Return the events of a step, each with the node that ran at its time."""
    # Spans may be nested: a node in a branch of an `If` runs within the span of the `If`. The
    # innermost span starts last.
    spans = sorted(_spans(profile, started), key=lambda span: span.start)
    starts = [span.start for span in spans]
    result = []
    for event in events:
        if event.kind in KEPT:
            span = _span_at(event.time, starts, spans)
            name, size = event.name, event.bytes
            if event.kind == "launch":
                name = readable(event.name)
                size = bytes_copied(name, span.inputs, span.outputs)
            result.append(Event(event.kind, printable(name, 120), size, printable(span.node, 120)))
    return tuple(result[:_MOST_EVENTS])


def bytes_copied(
    kernel: str, inputs: Sequence[_ProfiledTensor], outputs: Sequence[_ProfiledTensor]
) -> int:
    """Return the bytes of keys and values that a kernel copies; 0 for kernels that copy none.

    The stand-in libraries do not run kernels, so the bytes are computed from shapes. `Ungroup`
    repeats keys, or values, for each query head; the other kernels copy a cache.

    `inputs`: The dtype and shape of each input of its node: query, key, …
    `outputs`: The dtype and shape of each output: attention, and present key if there is one.
    """
    if not copies_of_cache([kernel]) or not outputs or len(inputs) < 2:
        return 0
    dtype, cache = (outputs if len(outputs) > 1 else inputs)[1]
    size = numpy_dtype(dtype_name(dtype)).itemsize * math.prod(cache)
    if "Ungroup" in kernel:
        size = size * _width(outputs[0][1]) // max(_width(cache), 1)
    return size * (2 if "Fused" in kernel else 1)  # a fused kernel copies keys and values


def _width(shape: Sequence[int]) -> int:
    """Return heads times channels of `[B, heads, L, D]` or `[B, L, heads * D]`."""
    return shape[1] * shape[3] if len(shape) == 4 else shape[-1]


def _spans(profile: Sequence[Mapping[str, Any]], started: int) -> Iterator[_Span]:
    for event in profile:
        name = str(event.get("name"))
        if event.get("cat") == "Node" and name.endswith(TIMED):
            # The profiler truncates start and duration to whole microseconds.
            end = started + (event["ts"] + event["dur"] + 2) * 1000
            args = event.get("args", {})
            node = name.removesuffix(TIMED) or args.get("op_name", "")
            inputs = _typed(args.get("input_type_shape", ()))
            outputs = _typed(args.get("output_type_shape", ()))
            yield _Span(started + event["ts"] * 1000, end, node, inputs, outputs)


def _typed(tensors: Iterable[Mapping[str, Sequence[int]]]) -> list[_ProfiledTensor]:
    """Return the dtype and shape of each tensor, which are its only key and value."""
    return [pair for tensor in tensors for pair in tensor.items()]


def _span_at(time: int, starts: list[int], spans: Sequence[_Span]) -> _Span:
    latest = bisect.bisect_right(starts, time) - 1
    # That span may have ended; enclosing ones started earlier and end later.
    for span in reversed(spans[max(latest - _DEEPEST, 0) : latest + 1]):
        if time < span.end:
            return span
    return _NO_NODE
