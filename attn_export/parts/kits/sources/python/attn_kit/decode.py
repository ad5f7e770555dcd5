"""Example of decoding with the KV cache and random inputs: a prompt, then single tokens."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from attn_kit.cache_layout import graph_axes, is_cache
from attn_kit.files import one_line, printable
from attn_kit.model import Model
from attn_kit.settings import AXES, CACHE, DECODE, INPUTS, NAME, PRESENTS

BATCH, PROMPT, OTHERS = 1, 16, 16


def main() -> int:
    """Decode, and print the time per token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    options = parser.parse_args()
    if CACHE == "none":
        print(f"{printable(NAME)} has no KV cache: there is nothing to decode step by step")
        return 0
    try:
        decode(Model(), options.tokens)
    except Exception as error:  # whatever the engine raises
        print(f"{printable(NAME)}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def decode(model: Model, count: int) -> None:
    """Run a prompt and then `count` tokens, and print the times."""
    random, capacity = np.random.default_rng(0), PROMPT + count
    caches = {n: np.zeros(shape(n, 0, 0, capacity), INPUTS[n]) for n in INPUTS if is_cache(n)}
    past_len, seconds = 0, []
    while past_len < capacity:
        new = PROMPT if not past_len else 1
        inputs = {n: draw(n, random, past_len, new, capacity) for n in INPUTS if n not in caches}
        started = time.perf_counter()
        outputs = model.run({**inputs, **caches}, in_place=CACHE == "in-place")
        seconds.append(time.perf_counter() - started)
        # The cache of this step is the past of the next one.
        caches = {n: outputs[PRESENTS[n]] for n in caches}
        past_len += new
    prompt, *tokens = (1e3 * s for s in seconds)
    print(
        f"{printable(NAME)}: prompt of {PROMPT} in {prompt:.2f} ms, then {len(tokens)} tokens, "
        f"{statistics.median(tokens):.3f} ms each (median); {printable(DECODE)}"
    )


def shape(name: str, past_len: int, new: int, capacity: int) -> list[int]:
    """Return the shape of an input, with the axes in the order of the graph."""
    sizes = {"batch": BATCH, "query_len": new, "past_len": past_len, "capacity": capacity}
    sizes |= {"total_len": past_len + new, "key_len": past_len + new, "logit_count": 1}
    # Other axes are those of your own module: choose their sizes here.
    return [sizes.get(axis, OTHERS) if isinstance(axis, str) else axis for axis in graph_axes(name)]


def draw(
    name: str, random: np.random.Generator, past_len: int, new: int, capacity: int
) -> np.ndarray:
    """Return values of an input: random numbers, a mask without effect, or positions."""
    size, dtype = shape(name, past_len, new, capacity), np.dtype(INPUTS[name])
    if name == "past_length":
        return np.full(size, past_len, dtype)
    if name in ("input_ids", "logit_index"):
        return np.zeros(size, dtype)
    if dtype.kind == "b":
        return np.ones(size, dtype)
    if dtype.kind in "iu" and AXES[name][-1:] != ["query_len"]:
        return np.ones(size, dtype)  # such as a mask without padding
    if dtype.kind in "iu":
        return np.broadcast_to(np.arange(past_len, past_len + new, dtype=dtype), size).copy()
    if "mask" in name:
        return np.zeros(size, dtype)
    return random.standard_normal(size).astype(dtype)


if __name__ == "__main__":
    sys.exit(main())
