"""A padded sequence, and the inputs for a piece of it."""

from __future__ import annotations

import torch
from slow import Inputs, draw_inputs
from torch import Tensor

from attn_export.attention import Attention

TOTAL = 9


def whole_sequence(module: Attention) -> Inputs:
    """Return three sequences of 9, with 0, 2 and 5 of padding on the left."""
    inputs = draw_inputs(module.spec, 3, TOTAL)
    if "attn_mask" in inputs:
        padding = torch.tensor([0, 2, 5]).view(3, 1, 1, 1)
        allowed = torch.arange(TOTAL).view(1, 1, 1, TOTAL) >= padding
        is_bool = inputs["attn_mask"].dtype == torch.bool
        shape = inputs["attn_mask"].shape
        inputs["attn_mask"] = (
            allowed
            if is_bool
            else inputs["attn_mask"].nan_to_num(neginf=0.0).masked_fill(~allowed, -torch.inf)
        ).expand(shape)
    return inputs


def piece_of(whole: Inputs, past: dict[str, Tensor], start: int, stop: int) -> Inputs:
    """Return the inputs of the queries from start to stop, whose keys reach up to stop."""
    piece = {"query": whole["query"][:, start:stop], **past}
    if "position_ids" in whole:
        piece["position_ids"] = whole["position_ids"][:, start:stop]
    if "attn_mask" in whole:
        mask = whole["attn_mask"][..., :stop]
        piece["attn_mask"] = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
    return piece
