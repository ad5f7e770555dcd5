"""The one case that is a whole decode: hundreds of tokens, which runtimes take step by step."""

from __future__ import annotations

from collections.abc import Mapping

from attn_export.cases.distant_positions import case_bytes
from attn_export.cases.draw import draw_inputs
from attn_export.cases.sizes import Sizes, with_sums
from attn_export.results import DECODE, Case
from attn_export.spec import AttentionSpec, Input, Shape

DECODE_BYTES = 8 * 2**20
"""What the case may take: a quarter of all."""

TOKENS = (300, 200, 100)
"""How many tokens are decoded, where there is room for so many."""


def decode_case(
    inputs: Mapping[str, Input],
    output_shapes: Mapping[str, Shape],
    spec: AttentionSpec,
    sums: Mapping[str, str],
) -> tuple[Case | None, str]:
    """Return the longest decode within the size limit, and a note if there is none.

    To the module it is one sequence without a past, in buffers that it fills.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output.
        spec: Whether a decode in pieces means what the whole means.
        sums: Sizes that others add up to.
    """
    # Without causal, tokens see those that are not there yet in a decode; "dynamic" turns keys by
    # the length at which they came.
    if not (spec.in_place and spec.causal) or spec.rotary_scaling == "dynamic":
        return None, ""
    for tokens in TOKENS:
        sizes = with_sums({"batch": 2, "query_len": tokens, "past_len": 0}, sums)
        if case_bytes(sizes, inputs, output_shapes) <= DECODE_BYTES:
            return _decode(inputs, sizes), ""
    return None, (
        f"no case decodes step by step: at these dimensions {TOKENS[-1]} tokens would take more "
        f"than {DECODE_BYTES >> 20} MiB"
    )


def _decode(inputs: Mapping[str, Input], sizes: Sizes) -> Case:
    name = f"{DECODE}_{sizes['query_len']}"
    drawn = draw_inputs(inputs, sizes, seed_words=(DECODE, name))
    return Case(name, DECODE, sizes, drawn, "prompt, tokens and chunks, in buffers that grow")
