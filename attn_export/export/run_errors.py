"""Errors that runs of users' modules raise, with advice where PyTorch's text gives none."""

from __future__ import annotations

import re

from attn_export.errors import one_line

_ADVICE = (
    (
        r"block_mask was created for block_mask\.shape=\((.*?)\)",
        r"a block mask of the sizes \1, which are not those of the inputs",
        "make it in forward: create_block_mask(mask_mod, None, None, q.shape[-2], k.shape[-2])",
    ),
    (
        r"NestedTensor",
        "a nested tensor, which lacks an operation",
        "pad and mask the sequences, and pass enable_nested_tensor=False to nn.TransformerEncoder",
    ),
)
"""Rows of a pattern that matches an error's text, the construct that causes it, and what to write
instead."""


def cause_in_run(error: Exception) -> str:
    """Return why a run of a module raised, on one line."""
    for pattern, construct, instead in _ADVICE:
        if match := re.search(pattern, str(error)):
            return f"{match.expand(construct)}; {instead}"
    return one_line(error)
