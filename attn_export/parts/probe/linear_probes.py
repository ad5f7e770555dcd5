"""Probes of `LinearAttention`: its state, its decay, its deltas and its chunks.

The expected outputs are what the operator gives in float64 with single steps changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from attn_export.cases.draw import draw_inputs
from attn_export.dialect_names import LINEAR_OPSET
from attn_export.explain.faults.fault import Changes, constant, plain, step
from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import OPERATORS, Evaluation
from attn_export.parts.probe.findings import Probe
from attn_export.parts.probe.probe_graphs import HKV, B, D, H, ProbeGraph, linear_inputs, make_model
from attn_export.tensorfile import Array, ArrayDict

_TOKENS = 5
_CHUNK = 2


def _graph(name: str, rule: str, *, past: bool = False, chunk_size: int = 0) -> ProbeGraph:
    attributes: dict[str, int | float | str] = {
        "q_num_heads": H, "kv_num_heads": HKV, "update_rule": rule, "chunk_size": chunk_size,
    }  # fmt: skip
    return ProbeGraph(
        name, past=past, attributes=attributes, opset=LINEAR_OPSET, operator="LinearAttention"
    )


_LINEAR, _GATED = _graph("linear", "linear"), _graph("gated", "gated", past=True)
_DELTA = _graph("gated delta", "gated_delta")
_STATE = _graph("linear state", "linear", past=True)
_CHUNKS = _graph("linear chunks", "linear", past=True, chunk_size=_CHUNK)


def linear_probes() -> Iterator[Probe]:
    """Yield the probes of linear attention, if the part that computes it in float64 is there."""
    if not any(operator.__name__ == "LinearAttention" for operator in OPERATORS):
        return
    yield _probe("linear scale", "what queries are multiplied by where scale is not set", _LINEAR, {
        "1/sqrt(D)": {}, "1": {"scale": constant(1.0)},
    })  # fmt: skip
    yield _probe("linear heads", f"which of {HKV} states query head h of {H} reads", _LINEAR, {
        f"blocks: h // {H // HKV}": {},
        f"tiles: h % {HKV}": {"kv_head": plain(lambda heads: np.arange(len(heads)) % HKV)},
        "the first": {"kv_head": plain(np.zeros_like)},
    })  # fmt: skip
    yield _probe("linear, normalised", "whether queries and keys are divided by their lengths",
        _LINEAR, {
            "as they are": {}, "keys": {"keys": plain(_unit)},
            "queries and keys": {"queries": plain(_unit), "keys": plain(_unit)},
        })  # fmt: skip
    yield _probe("linear, own token", "which tokens are in the state that a query reads", _LINEAR, {
        "with its own": {}, "before its own": {"reads": constant("before")},
    })  # fmt: skip
    yield _probe("linear, state", "the axes of past_state, where keys and values are as wide",
        _STATE, {
            "[D, Dv]": {}, "[Dv, D]": {"past": plain(lambda past: np.swapaxes(past, -1, -2))},
            "ignored": {"past": plain(np.zeros_like)},
        })  # fmt: skip
    yield _probe("linear chunk_size 2", "what chunk_size changes", _CHUNKS, {
        "nothing": {},
        "starts from 0": _restarting(lambda state, _: 0 * state),
        "starts from past": _restarting(lambda _, past: past),
        "past again": _restarting(lambda state, past: state + past),
    })  # fmt: skip
    yield _probe("decay, when", "whether the state decays before it is updated, or after", _GATED, {
        "before": {}, "after": {"decays": constant("last")},
        "never": {"kept": plain(np.ones_like)},
    })  # fmt: skip
    yield _probe("decay, of g", "what share of the state is kept", _GATED, {
        "exp(g)": {}, "g": {"kept": step("log_kept")},
        "-g": {"kept": lambda _, at: -at["log_kept"]},
        "exp(-g)": {"kept": lambda _, at: np.exp(-at["log_kept"])},
        "2^g": {"kept": lambda _, at: np.exp2(at["log_kept"])},
    })  # fmt: skip
    yield _probe("delta, found in", "the state in which a key finds what its value replaces",
        _DELTA, {
            "the decayed state": {}, "the state before": {"finds": constant("before")},
            "no state: no delta": {"found_rate": plain(np.zeros_like)},
        })  # fmt: skip


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True)))


def _restarting(restart: StepChange) -> Changes:
    starts = plain(lambda starts: np.arange(len(starts)) % _CHUNK == 0)
    return {"starts": starts, "restart": constant(restart)}


def _probe(name: str, about: str, graph: ProbeGraph, readings: Mapping[str, Changes]) -> Probe:
    """Return a probe whose first reading is that of the standard."""
    inputs, evaluation = _drawn(graph), Evaluation(make_model(graph))
    (node,) = evaluation.nodes
    values = evaluation.values(inputs)
    outputs = {
        reading: evaluation.attention(node, values, changes)["output"]
        for reading, changes in readings.items()
    }
    return Probe(
        name, about, graph, inputs, outputs, specified=next(iter(readings)),
        not_in_pytorch="has no linear attention",
    )  # fmt: skip


def _drawn(graph: ProbeGraph) -> ArrayDict:
    """Return inputs that tell the readings apart."""
    sizes = {"batch": B, "query_len": _TOKENS}
    drawn = draw_inputs(linear_inputs(graph), sizes, seed_words=("fingerprint", graph.name))
    least, key = -1.5, drawn["key"].reshape(B, _TOKENS, HKV, D)
    if "beta" in drawn:  # unit keys that find much of what others wrote
        least, drawn["key"] = -1.0, _unit(key[:, :1] + 0.5 * key).reshape(drawn["key"].shape)
        drawn["beta"] = 0.8 + 0.2 * np.tanh(drawn["beta"])
    if "decay" in drawn:
        drawn["decay"] = least * (0.75 + 0.25 * np.tanh(drawn["decay"]))
    if "past_state" in drawn:
        drawn["past_state"] *= 4
    return drawn
