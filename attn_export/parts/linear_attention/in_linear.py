"""Known faults of `LinearAttention` nodes: of the state, its decay, its deltas and its chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.faults.attention import SCALES, scale_of_width
from attn_export.explain.faults.fault import (
    Changes,
    Fault,
    GraphPlace,
    Locator,
    by_factor,
    constant,
    plain,
    repeat_first,
    roll,
    round_to_bfloat16,
    rows,
    step,
)
from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

At = Mapping[str, Any]
_RULES = ("linear", "gated", "delta", "gated_delta")
_BLOCKS = (16, 32, 64, 128, 256)

# -- places -------------------------------------------------------------------------------------


def _nodes(*rules: str) -> Locator:
    """Return what finds `LinearAttention` nodes with one of these rules."""

    def places(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
        for node in _all_nodes(evaluation):
            texts = {a.name: a.s.decode() for a in node.attribute}
            if texts.get("update_rule", "gated_delta") in rules:
                yield GraphPlace(
                    "", node.name, compute=functools.partial(_change, evaluation, node)
                )

    return places


def _all_nodes(evaluation: Evaluation) -> Iterator[onnx.NodeProto]:
    return (node for node in evaluation.nodes if node.op_type == "LinearAttention")


def _change(
    evaluation: Evaluation, node: onnx.NodeProto, values: Values, changes: Changes
) -> Mapping[str, Array]:
    return evaluation.attention(node, values, changes)


def _convolutions(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    for node in evaluation.nodes:
        if node.op_type == "CausalConvWithState":
            compute = functools.partial(_change, evaluation, node)
            yield GraphPlace("", node.name, compute=compute)


def _lengths(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Yield the quotients of queries and keys by their lengths, before the nodes."""
    for node in _all_nodes(evaluation):
        for index, name in enumerate(("queries", "keys")):
            made_by = evaluation.producer.get(node.input[index])
            while made_by is not None and made_by.op_type in ("Reshape", "Transpose"):
                made_by = evaluation.producer.get(made_by.input[0])
            if made_by is not None and made_by.op_type == "Div":
                steps = {"unit": made_by.output[0], "raw": made_by.input[0]}
                yield GraphPlace(name, made_by.name, steps)


# -- changes ------------------------------------------------------------------------------------


def _turned(x: Array) -> Array:
    if x.shape[-1] != x.shape[-2]:
        raise ValueError("the state is not square")
    return np.swapaxes(x, -1, -2)


def _of_log(function: Callable[[Array], Array]) -> StepChange:
    return lambda _, at: function(at["log_kept"])


def _starts(size: int) -> StepChange:
    return plain(lambda starts: np.arange(len(starts)) % size == 0)


def _where_chunks_start(size: int, value: float) -> StepChange:
    """Return the change to a value at tokens that start a chunk, but for the first token."""

    def change(x: Array, _: At) -> Array:
        t = np.arange(x.shape[1])
        starts = (t > 0) & (t % size == 0)
        return np.where(starts.reshape(-1, *[1] * (x.ndim - 2)), value, x)

    return change


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True)))


def _not_moved(attended: Array, _: At) -> Array:
    return np.swapaxes(attended, 1, 2).reshape(attended.shape)


def _interleaved(attended: Array, _: At) -> Array:
    return np.swapaxes(attended, 2, 3).reshape(attended.shape)


# -- the table ----------------------------------------------------------------------------------

_ANY, _GATED = _nodes(*_RULES), _nodes("gated", "gated_delta")
_DELTA, _PLAIN = _nodes("delta", "gated_delta"), _nodes("linear", "gated")

KNOWN: Final = (
    *(Fault(_ANY, "scale", f"the scale of linear attention {effect}",
            {"scale": scale_of_width(wrong)})
      for effect, wrong in SCALES.items()),
    *rows(_ANY,
        ("tiled heads", "query head h reads the state of head h % Hkv in place of h // (H / Hkv)",
         {"kv_head": lambda heads, at: np.arange(len(heads)) % at["keys"].shape[2]}),
        ("one state for all heads", "every query head reads the state of head 0",
         {"kv_head": plain(np.zeros_like)}),
        ("states reversed", "query heads read the states in reverse",
         {"kv_head": plain(lambda heads: heads[::-1])}),
        ("heads reversed", "the results of query heads are in reverse",
         {"attended": plain(lambda attended: attended[:, :, ::-1])}),
        ("heads not moved", "[B, H, L, Dv] is read as [B, L, H·Dv] without a transpose",
         {"attended": _not_moved}),
        ("heads interleaved", "heads are merged as [Dv, H] in place of [H, Dv]",
         {"attended": _interleaved}),
        ("state transposed", "past_state is read as [B, Hkv, Dv, D]", {"past": plain(_turned)}),
        ("state transposed", "present_state is given as [B, Hkv, Dv, D]",
         {"present": plain(_turned)}),
        ("state transposed", "past_state and present_state are [B, Hkv, Dv, D]",
         {"past": plain(_turned), "present": plain(_turned)}),
        ("state not updated", "present_state is past_state", {"present": step("past")}),
        ("read before the update", "queries read the state before their token's key and value",
         {"reads": constant("decayed")}),
        ("read before the update", "queries read the state of the token before",
         {"reads": constant("before")}),
        ("token before", "queries are those of the token before", {"queries": roll(1, 1)}),
        ("token before", "keys are those of the token before", {"keys": roll(1, 1)}),
        ("token before", "values are those of the next token", {"values": roll(-1, 1)}),
        ("state precision", "the state is rounded to bfloat16 after each token",
         {"stored": constant(round_to_bfloat16)}),
        ("state precision", "the state is rounded to float16 after each token",
         {"stored": constant(lambda x: x.astype(np.float16).astype(np.float64))})),
    *(row for size in _BLOCKS for row in rows(_ANY,
        ("chunk boundary", f"each chunk of {size} tokens starts from 0",
         {"starts": _starts(size), "restart": constant(lambda state, _: 0 * state)}),
        ("chunk boundary", f"each chunk of {size} tokens starts from past_state",
         {"starts": _starts(size), "restart": constant(lambda _, past: past)}),
        ("chunk boundary", f"past_state is added at each chunk of {size} tokens",
         {"starts": _starts(size), "restart": constant(lambda state, past: state + past)}))),
    *(row for size in _BLOCKS for row in (
        Fault(_GATED, "chunk boundary", f"the state does not decay at every {size}th token",
                {"kept": _where_chunks_start(size, 1.0)}),
        Fault(_DELTA, "chunk boundary", f"every {size}th token is not written",
                {"rate": _where_chunks_start(size, 0.0),
                 "found_rate": _where_chunks_start(size, 0.0)}))),
    *rows(_GATED,
        ("decay after the update", "the state decays after a token's key and value are added",
         {"decays": constant("last")}),
        ("gate in log space", "the decay is used as it is: no exponential is taken",
         {"kept": step("log_kept")}),
        ("gate in log space", "the decay is used without its sign and exponential",
         {"kept": _of_log(np.negative)}),
        ("gate in log space", "the state keeps 1 + g in place of exp(g)",
         {"kept": _of_log(lambda g: 1 + g)}),
        ("gate in log space", "the state keeps exp(-g) in place of exp(g)",
         {"kept": _of_log(lambda g: np.exp(-g))}),
        ("gate in log space", "the state keeps 2^g in place of exp(g)", {"kept": _of_log(np.exp2)}),
        ("decay dropped", "the state does not decay", {"kept": plain(np.ones_like)}),
        ("decay twice", "the state decays twice", {"kept": plain(np.square)}),
        ("decay of another token", "the decay is that of the token before", {"kept": roll(1, 1)}),
        ("decay of another token", "the decay is that of the next token", {"kept": roll(-1, 1)}),
        ("decay of one head", "the decay of head 0 is that of every head",
         {"kept": repeat_first(2)}),
        ("decay of one channel", "the decay of channel 0 is that of the whole head",
         {"kept": repeat_first(3)})),
    *rows(_nodes("gated_delta"),
        ("found before the decay", "deltas are taken from the state before it decays",
         {"finds": constant("before")})),
    *rows(_DELTA,
        ("rate dropped", "deltas are written as they are, without beta",
         {"rate": plain(np.ones_like), "found_rate": plain(np.ones_like)}),
        ("rate twice", "beta is applied twice",
         {"rate": plain(np.square), "found_rate": plain(np.square)}),
        ("rate of one term", "beta scales the value, and not what the key finds in the state",
         {"found_rate": plain(np.ones_like)}),
        ("rate of one term", "beta scales what the key finds in the state, and not the value",
         {"rate": plain(np.ones_like)}),
        ("rate of another token", "beta is that of the token before",
         {"rate": roll(1, 1), "found_rate": roll(1, 1)}),
        ("rate of one head", "beta of head 0 is that of every head",
         {"rate": repeat_first(2), "found_rate": repeat_first(2)}),
        ("delta dropped", "values are written, not their deltas",
         {"found_rate": plain(np.zeros_like)}),
        ("delta added", "what the key finds in the state is added to the value",
         {"found_rate": plain(np.negative)})),
    *rows(_convolutions,
        ("kernel reversed", "the convolution multiplies a token's own channel by the first weight",
         {"weight": plain(lambda weight: weight[..., ::-1])}),
        ("kernel of one channel", "the weights of channel 0 are those of every channel",
         {"weight": repeat_first(0)}),
        ("state not updated", "present_conv is past_conv", {"present": step("past")}),
        ("state reversed", "present_conv has the last tokens first",
         {"present": plain(lambda present: present[..., ::-1])})),
    *rows(_lengths,
        ("not normalised", "{} are not divided by their lengths", {"unit": step("raw")})),
    *rows(_PLAIN,
        ("normalised", "the operator divides keys by their lengths", {"keys": plain(_unit)}),
        ("normalised", "the operator divides queries by their lengths", {"queries": plain(_unit)}),
        ("normalised", "the operator divides queries and keys by their lengths",
         {"keys": plain(_unit), "queries": plain(_unit)})),
    by_factor(_ANY, "scale", "the scale of linear attention is multiplied by {factor}", "scale"),
    by_factor(_GATED, "gate in log space", "the decay is multiplied by {factor}", "log_kept"),
    by_factor(_DELTA, "rate", "beta is multiplied by {factor}", "rate", "found_rate"),
)  # fmt: skip
"""Known faults of linear attention."""
