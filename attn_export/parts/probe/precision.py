"""Probes of precision: the significand bits that a runtime keeps, and its handling of subnormals.

Each batch element tests one number of bits b at one step of attention. The step must hold
1 + 2^-b, or a number that needs as many bits; if it is rounded to fewer, the output changes
visibly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attn_export.parts.probe.findings import SOMETHING_ELSE, Probe, ProbeFinding, attend
from attn_export.parts.probe.mask_probes import PLAIN
from attn_export.parts.probe.probe_graphs import HKV, D, H, ProbeGraph
from attn_export.tensorfile import ArrayDict

_BITS = np.arange(1, 24)
"""The exponents b of 1 + 2^-b that are tested; float32 holds all 23."""

STEPS = ("query", "key", "scores", "weights", "value")
"""Values that a runtime may round: the operands of both products, and the input of the softmax."""

WIDE = 2.0**17
"""A number that overflows in float16, and in no other format."""

FORMATS = {24: "float32", 11: "TF32", 8: "bfloat16"}
"""Formats by the bits of their significand, its leading 1 included."""

LEAST = 1 / (1 + np.exp(-1.0)) - 0.5
_LOST: dict[str, np.ndarray | float] = {"value": 2.0**-_BITS, "weights": 0.5}
"""Error of the output if the bit is lost, by step: for each b, or all. Else at least `LEAST`."""

_SLACK = {24: 3, 11: 1, 8: 1}
"""Bits that a softmax may lose in exponentials and division, by the bits of the format."""

HALF = ProbeGraph("float16", dtype="float16")


def precision_probes() -> Iterator[Probe]:
    """Yield the probes of precision."""
    yield Probe(
        "precision", "bits that survive Q·Kᵀ, softmax and P·V where everything is float32",
        PLAIN, bit_inputs(), {}, specified="float32", reader=read_bits,
    )  # fmt: skip
    yield _half()
    yield _small_number(
        "small values", "values of 1e-40, which float32 holds with fewer bits",
        _two_keys(0.0, 1e-40, 1e-40),
    )  # fmt: skip
    yield _small_number(
        "small weights", "a weight of exp(-92), which float32 holds with fewer bits",
        _two_keys(-92.0, 0.0, 2.0**120),
    )  # fmt: skip


# -- bits --------------------------------------------------------------------------------------


def bit_inputs() -> ArrayDict:
    """Return queries `[5 · 23 + 1, H, 1, D]`, and keys and values `[5 · 23 + 1, Hkv, 2, D]`.

    The batch has 23 elements for each of `STEPS`, and a last one for the range. All scores
    contain the factor 1/√D = 1/4.
    """
    batch = len(STEPS) * len(_BITS) + 1
    query, key, value = (np.zeros(shape) for shape in _shapes(batch))
    for index, b in enumerate(_BITS):
        query_case, key_case, scores_case, weights_case, value_case = (
            _batch_index(step, index) for step in range(len(STEPS))
        )
        large, odd_number = 2.0 ** (b + 2), 1 + 2.0**-b
        # The score of the first key is large · odd - large, which is 4, or 0.
        query[query_case, ..., :2], key[query_case, :, 0, :2] = (odd_number, 1.0), (large, -large)
        query[key_case, ..., :2], key[key_case, :, 0, :2] = (large, -large), (odd_number, 1.0)
        # Scores of 2^b + 1 and 2^b.
        query[scores_case, ..., :2] = 1.0
        key[scores_case, :, :, 0], key[scores_case, :, 0, 1] = large, 4.0
        value[[query_case, key_case, scores_case], :, 0] = 1.0
        # Scores that differ by 2^-b: so do the weights, about, by half of it.
        query[weights_case, ..., 0], key[weights_case, :, 0, 0] = 1.0, 2.0 ** (2 - b)
        value[weights_case, :, 0], value[weights_case, :, 1] = 2.0**b, -(2.0**b)
        value[value_case] = odd_number
    value[-1] = WIDE
    inputs = {"query": query, "key": key, "value": value}
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def _shapes(batch: int) -> Sequence[tuple[int, ...]]:
    """Return the shapes of one query, and of two keys and values, in each batch element."""
    return (batch, H, 1, D), (batch, HKV, 2, D), (batch, HKV, 2, D)


def _batch_index(step: int, index: int) -> int:
    return step * len(_BITS) + index


def read_bits(output: np.ndarray) -> ProbeFinding:
    """Return the number format that the bits of an output `[B, H, L, D]` match.

    The finding also has the number of bits at each step.
    """
    inputs = bit_inputs()
    if output.shape != inputs["query"].shape:
        return ProbeFinding(SOMETHING_ELSE, f"its shape is {list(output.shape)}")
    expected = attend(inputs)
    error = np.abs(output.astype(np.float64) - expected).max(axis=(1, 2, 3))
    bits_by_step = {}
    for step, name in enumerate(STEPS):
        rows = slice(_batch_index(step, 0), _batch_index(step + 1, 0))
        kept = error[rows] < _LOST.get(name, LEAST) / 2  # False for NaN
        bits_by_step[name] = 1 + (len(kept) if kept.all() else int(np.argmin(kept)))
    detail = ", ".join(f"{name} {count}" for name, count in bits_by_step.items())
    return ProbeFinding(
        _format(bits_by_step, in_range=bool(error[-1] < WIDE / 2)), f"bits: {detail}"
    )


def _format(bits: dict[str, int], *, in_range: bool) -> str:
    least = min(bits.values())
    known = (count for count, slack in _SLACK.items() if count - slack <= least <= count)
    if not in_range:
        return "float16"
    return FORMATS.get(next(known, 0), f"{least} bits")


# -- float16 -----------------------------------------------------------------------------------


def _half() -> Probe:
    query, key, value = (np.zeros(shape) for shape in _shapes(1))
    # Scores of 2048.75 and 2048, between which float16 has nothing.
    query[..., 0], query[..., 1] = 64.0, 1.0
    key[..., 0], key[:, :, 0, 1] = 128.0, 3.0
    value[:, :, 0], value[:, :, 1] = 1.0, -1.0
    arrays = {"query": query, "key": key, "value": value}
    inputs = {name: array.astype(np.float16) for name, array in arrays.items()}
    outputs = {"float32 scores": attend(inputs), "float16 scores": np.zeros_like(query)}
    return Probe(
        "precision, float16", "what holds the scores of float16 queries and keys",
        HALF, inputs, outputs, specified="float16 scores",
    )  # fmt: skip


# -- small numbers -----------------------------------------------------------------------------


def _small_number(name: str, about: str, inputs: ArrayDict) -> Probe:
    kept = attend(inputs)
    readings = {"kept": kept, "flushed to 0": np.zeros_like(kept)}
    return Probe(name, about, PLAIN, inputs, readings)


def _two_keys(score: float, first: float, second: float) -> ArrayDict:
    """Return one query and two keys with scores 0 and `score`, and values `first` and `second`."""
    query, key, value = (np.zeros(shape, np.float32) for shape in _shapes(1))
    query[..., 0], key[:, :, 1, 0] = 1.0, score * 4
    value[:, :, 0], value[:, :, 1] = first, second
    return {"query": query, "key": key, "value": value}
