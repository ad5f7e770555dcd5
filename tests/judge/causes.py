"""The kind of the cause that `explain` names first for planted faults of attention."""

from __future__ import annotations

from collections.abc import Mapping

_FAULTS: Mapping[str, str] = {
    "scale": "scale_of_wider_head scale_of_narrower_head scale_twice scale_missing",
    "mask scaled": "scale_after_mask", "tiled heads": "heads_tiled",
    "K/V heads reversed": "kv_heads_reversed", "one K/V head for all": "one_kv_head",
    "swapped heads": "heads_swapped", "heads interleaved": "heads_interleaved",
    "heads reversed": "heads_reversed", "heads shifted": "heads_shifted",
    "heads not moved": "heads_not_moved", "mask dropped": "mask_dropped",
    "mask inverted": "mask_inverted", "mask of one batch row": "mask_of_one_batch_row",
    "mask of one head": "mask_of_one_head", "mask of one query": "mask_of_one_query",
    "mask shifted": "mask_one_key_late", "mask values dropped": "mask_values_dropped",
    "mask lowest is hidden": "mask_lowest_is_masked", "weak mask": "masked_is_minus_10",
    "mask or causal": "mask_or_causal", "mask of some keys": "mask_not_of_past",
    "mask dropped beside causal": "causal_drops_alibi", "last key dropped": "last_key_dropped",
    "first key dropped": "key_0_dropped", "causal dropped": "causal_dropped",
    "causal added": "causal_added", "causal reversed": "causal_reversed",
    "causal offset": "causal_one_ahead causal_one_behind causal_without_past causal_from_0 "
    "causal_from_end_of_capacity",
    "own key alone": "own_key_alone", "length of one batch row": "causal_of_row_0",
    "fully masked rows": "masked_row_is_mean masked_row_is_nan masked_row_is_first_value",
    "missing bias": "no_output_bias norm_of_q_without_bias", "bias added twice": "k_bias_twice",
    "past after new keys": "past_after_new",
    "past ignored": "past_ignored past_hidden_in_one_batch_row", "past shifted": "past_shifted",
    "past of one batch row": "past_of_keys_of_one_batch_row", "cache not written": "not_written",
    "cache length": "written_where_row_0_is one_length_for_all_rows",
    "softmax in low precision": "softmax_float16 softmax_bfloat16",
    "softmax over queries": "softmax_over_queries", "softmax base": "softmax_base_2",
    "softmax not normalised": "softmax_not_normalised", "softmax plus one": "sink_of_0",
    "rotation left out": "rotary_missing", "rotary positions": "rotary_positions_times_1.5",
    "rotary pairs": "rotary_interleaved_for_half rotary_half_for_interleaved",
    "rotation reversed": "rotary_backwards rotary_of_keys_backwards positions_backwards",
    "position offset": "rotary_ignores_past rotary_one_late positions_from_0 positions_one_late "
    "position_ids_of_row_0 position_ids_one_late",
    "positions of one batch row": "positions_of_row_0", "positions reversed": "rotary_in_reverse",
    "norm left out": "no_norm_of_q", "norm without weight": "norm_of_q_without_weight",
    "window offset": "window_left_one_more window_left_one_less window_ignores_past "
    "window_right_one_more window_right_one_less",
    "window dropped": "window_left_dropped window_right_dropped", "missing sinks": "no_sink",
    "wrong sinks": "sink_is_zero",
    "softcap": "no_softcap softcap_1_percent_more softcap_1_percent_less softcap_clips",
}  # fmt: skip
"""The names of faults by the kind of their cause."""

CAUSES = {fault: kind for kind, faults in _FAULTS.items() for fault in faults.split()}
