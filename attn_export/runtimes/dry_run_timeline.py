"""Events of the stand-in libraries, and the nodes whose run caused them."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import printable
from attn_export.runtimes.dry_run_results import Event
from attn_export.tensorfile import numpy_dtype

# -- readable names of kernels, and the kinds of those that compute attention -------------------


UNFUSED = "unfused: products and softmax"

ATTENTION: Mapping[str, str] = {
    r"grp\d+\w*::kernel_mha\b|\bkernel_mha\b": "XQA",
    r"\bflash_fwd_splitkv_kernel\b": "flash attention, split K/V",
    r"\bflash_fwd_kernel\b|\bflash_fprop\w*": "flash attention",
    r"\blean_fwd_kernel\b": "lean attention",
    r"\battention_kernel_batched_impl\w*": "CUTLASS memory-efficient",
    r"\bmasked_multihead_attention_kernel\b": "decoder masked attention",
    r"\bfmha_\w+": "TensorRT fused attention",
}
"""Regular expressions of kernels that are a whole attention, with the name of their kind."""

SOFTMAX = re.compile(r"[Ss]oft[Mm]ax|softmax_warp_forward")

COPIES = re.compile(
    r"\bUngroup\w*|ConcatNewToPastKV|ConcatTensorToTensor|ConcatPastToPresent|ConcatKV"
    r"|AppendPastPresent|CopyKVCache"
)
"""Kernels that copy past keys and values, or repeat them for each query head."""

_NAMESPACES = re.compile(
    r"\b(?:onnxruntime|contrib|cuda|attention_softmax|flash|cutlass|detail|std)::"
    r"|\(anonymous namespace\)::"
)


def readable(symbol: str) -> str:
    """Return the name of a kernel without types, arguments and common namespaces."""
    name = without_templates(demangled(symbol))
    name = _NAMESPACES.sub("", name.replace("(anonymous namespace)::", ""))
    name = name.partition("(")[0].strip()
    return name.removeprefix("void ").strip() or symbol[:80]


@functools.cache
def demangled(symbol: str) -> str:
    """Return a symbol of C++ as it was written; itself where it is none."""
    if not symbol.startswith("_Z"):
        return symbol
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int(0)
    made = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not made:
        return symbol
    text = ctypes.string_at(made).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(made))
    return text


def without_templates(text: str) -> str:
    """Return a declaration without what is between angle brackets."""
    kept, depth = [], 0
    for char in text:
        depth += char == "<"
        if not depth:
            kept.append(char)
        depth -= char == ">" and depth > 0
    return "".join(kept)


def kinds_of_attention(names: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of attention among readable names of kernels, each once, in order."""
    names = list(names)
    found = [
        kind for name in names for pattern, kind in ATTENTION.items() if re.search(pattern, name)
    ]
    if not found and any(SOFTMAX.search(name) for name in names):
        found = [UNFUSED]
    return tuple(dict.fromkeys(found))


def copies_of_cache(names: Iterable[str]) -> dict[str, int]:
    """Return the kernels that copy keys and values, with how often each is launched."""
    found: dict[str, int] = {}
    for name in names:
        if COPIES.search(name):
            found[name] = found.get(name, 0) + 1
    return found


# -- the events of a step -----------------------------------------------------------------------


KEPT = ("launch", "library", "to device", "to host", "on device", "fill", "wait")
MOST_EVENTS = 20_000
TIMED = "_kernel_time"
DEEPEST = 1000
"""The most nodes of a branch for which the node around it is found."""


Typed = tuple[str, Sequence[int]]
"""The type of a tensor, as ONNX Runtime's profiler names it, and its shape."""

ONNX_NAMES = {"float": "float32", "double": "float64"}


@dataclasses.dataclass(frozen=True)
class _Span:
    """The time in which a node ran, in nanoseconds."""

    start: int
    end: int
    node: str
    inputs: Sequence[Typed] = ()
    outputs: Sequence[Typed] = ()


NO_NODE = _Span(0, 0, "")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A line of the stand-in's record.

    Attributes:
        time: In nanoseconds, of the clock that ONNX Runtime's profiler reads.
        kind: The kind of the event.
        bytes: Of memory.
        name: A kernel or a function.
    """

    time: int
    kind: str
    bytes: int
    name: str


def read_record(path: Path, start: int = 0, end: int = -1) -> list[Recorded]:
    """Return the events recorded between two positions in the file.

    Args:
        path: The record.
        start: The first byte.
        end: The byte after the last; -1 for all.
    """
    text = path.read_bytes()[start : end if end >= 0 else None].decode(errors="replace")
    lines = [line.split("\t") for line in text.splitlines()]
    return [Recorded(int(time), kind, int(size), name) for time, kind, size, name in lines]


def peak_bytes(events: Sequence[Recorded], before: Sequence[Recorded] = ()) -> int:
    """Return the most device memory that was allocated at once.

    Args:
        events: The events of that time.
        before: All events before them.
    """
    most = used = sum(map(_allocated, before))
    for event in events:
        used += _allocated(event)
        most = max(most, used)
    return most


def _allocated(event: Recorded) -> int:
    return event.bytes * ((event.kind == "malloc") - (event.kind == "free"))


def events_of_step(
    events: Sequence[Recorded], profile: Sequence[Mapping[str, Any]], started: int
) -> tuple[Event, ...]:
    """Return the events of a step, each with the node within whose time it lies.

    Args:
        events: The events of the step.
        profile: The events of ONNX Runtime's profiler.
        started: The time at which the profiler started, in nanoseconds.
    """
    # A node may lie within another, such as a branch of an `If`: the later start is the inner one.
    spans = sorted(_spans(profile, started), key=lambda span: span.start)
    starts = [span.start for span in spans]
    found = []
    for event in events:
        if event.kind in KEPT:
            span = _span_at(event.time, starts, spans)
            name, size = event.name, event.bytes
            if event.kind == "launch":
                name = readable(event.name)
                size = bytes_copied(name, span.inputs, span.outputs)
            found.append(Event(event.kind, printable(name, 120), size, printable(span.node, 120)))
    return tuple(found[:MOST_EVENTS])


def bytes_copied(kernel: str, inputs: Sequence[Typed], outputs: Sequence[Typed]) -> int:
    """Return the bytes of keys or values that a kernel writes to another place; 0 of any other.

    A stand-in does not see what a kernel writes: they follow from shapes. `Ungroup` repeats keys,
    or values, for each query head; the others write caches anew.

    Args:
        kernel: Its readable name.
        inputs: Type and shape of each input of its node: query, key, …
        outputs: Likewise: attention, and present key where there is one.
    """
    if not copies_of_cache([kernel]) or not outputs or len(inputs) < 2:
        return 0
    dtype, cache = (outputs if len(outputs) > 1 else inputs)[1]
    size = numpy_dtype(ONNX_NAMES.get(dtype, dtype)).itemsize * math.prod(cache)
    if "Ungroup" in kernel:
        size = size * _width(outputs[0][1]) // max(_width(cache), 1)
    return size * (2 if "Fused" in kernel else 1)  # keys and values by one launch


def _width(shape: Sequence[int]) -> int:
    """Return heads times channels of `[B, heads, L, D]` or `[B, L, heads * D]`."""
    return shape[1] * shape[3] if len(shape) == 4 else shape[-1]


def _spans(profile: Sequence[Mapping[str, Any]], started: int) -> Iterator[_Span]:
    for event in profile:
        name = str(event.get("name"))
        if event.get("cat") == "Node" and name.endswith(TIMED):
            # The profiler counts whole microseconds.
            end = started + (event["ts"] + event["dur"] + 2) * 1000
            args = event.get("args", {})
            inputs, outputs = (
                [one for each in args.get(key, ()) for one in each.items()]
                for key in ("input_type_shape", "output_type_shape")
            )
            node = name.removesuffix(TIMED) or args.get("op_name", "")
            yield _Span(started + event["ts"] * 1000, end, node, inputs, outputs)


def _span_at(time: int, starts: list[int], spans: Sequence[_Span]) -> _Span:
    latest = bisect.bisect_right(starts, time) - 1
    # Before it others may have started that last longer: nodes around a branch.
    for span in reversed(spans[max(latest - DEEPEST, 0) : latest + 1]):
        if time < span.end:
            return span
    return NO_NODE
