"""Faults in a cache in place: the position of new keys, and the number of keys in use."""

from __future__ import annotations

import fault_changes as c
import numpy as np
import numpy_positions as positions
from fault import (
    Fault,
    both,
    counts_positions,
    gives_weights,
    has_left,
    has_rotary,
    in_place,
    is_causal,
    no,
)
from fault_changes import Array, At
from numpy_attention import Change

# -- changes

of_row_0 = c.value(c.first_of(0))


def end_of_buffer(at: At) -> int:
    """Return the position of the new keys if they were the last of the capacity."""
    return at["inputs"]["past_key"].shape[2] - at["inputs"]["query"].shape[1]


def at_the_end(held: Array, at: At) -> Array:
    return np.full_like(held, end_of_buffer(at))


def of_longest(held: Array, _: At) -> Array:
    return np.full_like(held, held.max())


def rest_of(change: Change) -> Change:
    """Change the buffer after the keys that a row holds."""

    def changed(present: Array, at: At) -> Array:
        rest = np.arange(present.shape[2]) >= at["count"][:, None]
        return np.where(rest[:, None, :, None], change(present, at), present)

    return changed


def zeros(array: Array, _: At) -> Array:
    return np.zeros_like(array)


def past_zeroed(present: Array, at: At) -> Array:
    """Keep the new keys alone, in a fresh buffer."""
    past = np.arange(present.shape[2]) < at["past_length"][:, None]
    return np.where(past[:, None, :, None], np.float32(0), present)


def aligned_to_end(_: Array, at: At) -> Array:
    return offset_from_end(_, at) <= 0


def offset_from_end(_: Array, at: At) -> Array:
    return positions.offsets(np.full_like(at["P"], end_of_buffer(at)), at["shape"])


def weights_of_rest(weights: Array, at: At) -> Array:
    """Set stale values in the buffer of weights."""
    rest = np.arange(weights.shape[-1]) >= at["count"][:, None, None, None]
    return np.where(rest, np.float32(0.1), weights)


def from_0(position: Array, at: At) -> Array:
    return position - at["past_length"][:, None]


def turning(change: Change) -> dict[str, Change]:
    """Apply a change to queries and keys alike."""
    return {"positions_q": change, "positions_k": change}


rotates = both(in_place, counts_positions)
windowed = both(in_place, has_left)

WRITING = (
    Fault("written_one_late", "after past_length + 1 keys",
          {"written_after": c.value(lambda held: held + 1)}, in_place),
    Fault("written_one_early", "over the last key",
          {"written_after": c.value(lambda held: held - 1)}, in_place),
    Fault("written_at_0", "over the first keys", {"written_after": zeros}, in_place),
    Fault("written_at_end", "the last of the capacity", {"written_after": at_the_end}, in_place),
    Fault("written_where_row_0_is", "one place for all rows",
          {"written_after": of_row_0}, in_place),
    Fault("written_where_longest_is", "one place for all rows",
          {"written_after": of_longest}, in_place),
    Fault("not_written", "the buffers as they were", {"kv": lambda _, at: [
        at["inputs"]["past_key"], at["inputs"]["past_value"]]}, in_place),
    Fault("present_key_not_written", "the buffer as it was",
          c.output("present_key", lambda _, at: at["inputs"]["past_key"]), in_place),
    Fault("present_value_not_written", "the buffer as it was",
          c.output("present_value", lambda _, at: at["inputs"]["past_value"]), in_place),
    Fault("present_rest_zeroed", "what lies behind the keys is lost",
          c.output("present_key", rest_of(zeros)), in_place),
    Fault("present_past_zeroed", "a fresh buffer",
          c.output("present_value", past_zeroed), in_place),
)  # fmt: skip

COUNTING = (
    Fault("one_length_for_all_rows", "row 0's",
          {"past_length": of_row_0}, in_place),
    Fault("longest_length_for_all_rows", "the largest", {"past_length": of_longest}, in_place),
    Fault("count_is_past", "past_length for past_length + L",
          {"count": lambda _, at: at["past_length"]}, in_place),
    Fault("count_one_more", "the key behind the last",
          {"count": c.value(lambda count: count + 1)}, both(in_place, no(is_causal))),
    Fault("count_one_less", "not the last key",
          {"count": c.value(lambda count: count - 1)}, in_place),
    Fault("count_is_capacity", "all of the buffer",
          {"count": lambda count, at: np.full_like(count, at["shape"][-1])},
          both(in_place, no(is_causal))),
    Fault("count_of_longest", "the longest row's for all",
          {"count": of_longest}, both(in_place, no(is_causal))),
    Fault("causal_from_end_of_capacity", "query i sees keys up to S - L + i",
          {"causal": aligned_to_end}, both(in_place, is_causal)),
    Fault("causal_from_0", "query i sees keys up to i",
          {"causal": c.causal(lambda P: 0 * P)}, both(in_place, is_causal)),
    Fault("causal_of_row_0", "row 0's for all",
          {"causal": of_row_0}, both(in_place, is_causal)),
    Fault("weights_of_rest_left", "not written to 0",
          c.output("attn_weights", weights_of_rest), both(in_place, gives_weights)),
)  # fmt: skip

PLACES = (
    Fault("positions_from_0", "past_length ignored", turning(from_0), rotates),
    Fault("positions_of_queries_from_0", "keys right", {"positions_q": from_0}, rotates),
    Fault("positions_of_row_0", "for all rows", turning(of_row_0), rotates),
    Fault("positions_one_late", "counted from 1",
          turning(c.value(lambda p: p + 1)), rotates),
    Fault("positions_backwards", "by -angle",
          {"inv_freq": c.value(np.negative)}, both(in_place, has_rotary)),
    Fault("window_from_end_of_capacity", "as if the new keys were the last",
          {"window_offset": offset_from_end}, windowed),
    Fault("window_of_row_0", "row 0's for all", {"window_offset": of_row_0}, windowed),
    # ALiBi falls by the same for all keys before, which softmax does not see.
    Fault("bias_from_end_of_capacity", "as if the new keys were the last",
          {"offset": offset_from_end}, both(in_place, lambda spec: spec.relative_buckets > 0)),
    Fault("bias_of_row_0", "row 0's for all", {"offset": of_row_0},
          both(in_place, lambda spec: spec.alibi or spec.relative_buckets > 0)),
)  # fmt: skip

IN_PLACE = (*WRITING, *COUNTING, *PLACES)
