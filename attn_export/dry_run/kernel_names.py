"""Readable names of CUDA kernels, and the kinds of those that compute attention."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable, Mapping

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
