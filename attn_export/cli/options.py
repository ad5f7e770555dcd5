"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from attn_export.spec.rules import CACHES, DTYPES, NORMS, ROTARIES, ROTARY_SCALINGS

Command = Callable[..., Any]


def runtime_options(command: Command) -> Command:
    """Add the options --runtime, --require, --atol and --rtol."""
    for option in (
        click.option("--rtol", type=click.FloatRange(min=0), help="Relative part of --atol."),
        click.option(
            "--atol", type=click.FloatRange(min=0),
            help="Also fail where |runtime - eager| > atol + rtol * |eager|.",
        ),
        click.option(
            "--require", multiple=True, metavar="NAME", help="Fail if this runtime cannot run."
        ),
        click.option(
            "--runtime", "runtimes", multiple=True, metavar="NAME",
            help="A runtime to run; all; -NAME leaves one out of all.  "
            "[default: ort-cpu, and ort-cuda where there is a GPU]",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


SPEC_OPTIONS = {
    "embed_dim": (click.IntRange(min=1), "E, the width of query and output."),
    "num_heads": (click.IntRange(min=1), "H, the query heads."),
    "num_kv_heads": (click.IntRange(min=1), "Hkv, the key/value heads; divides H."),
    "head_dim": (click.IntRange(min=1), "D, the width of a head.  [default: E / H]"),
    "v_head_dim": (click.IntRange(min=1), "Dv, the width of a value head.  [default: D]"),
    "kdim": (click.IntRange(min=1), "Width of key, in cross-attention."),
    "vdim": (click.IntRange(min=1), "Width of value, in cross-attention."),
    "scale": (float, "Factor on the scores.  [default: 1 / sqrt(D)]"),
    "attn_mask": (str, 'none, or dtype and shape such as "bool[B,1,1,S]" or "float[L,S]".'),
    "bias": (str, 'Projections with a bias: all, none, or some as in "q,k,v".'),
    "qk_norm": (click.Choice(NORMS), "Normalisation of query and key heads."),
    "norm_eps": (float, "What qk_norm adds to the variance."),
    "rotary": (click.Choice(ROTARIES), "Rotary positions: none, or how pairs are chosen."),
    "rotary_dim": (click.IntRange(min=2), "R, how much of a head is rotated.  [default: D]"),
    "rotary_theta": (float, "Base of the wavelengths.  [default: 10000]"),
    "rotary_scaling": (click.Choice(ROTARY_SCALINGS), "How a longer context is stretched."),
    "rotary_factor": (float, "By how much the context is stretched."),
    "rotary_original_len": (click.IntRange(min=1), "The context of the training."),
    "rotary_low_freq": (float, "llama3: turns below which a pair is stretched."),
    "rotary_high_freq": (float, "llama3: turns above which a pair is left alone."),
    "rotary_beta_fast": (float, "yarn: turns at which its ramp begins."),
    "rotary_beta_slow": (float, "yarn: turns at which its ramp ends."),
    "rotary_magnitude": (float, "yarn: factor on rotated queries and keys."),
    "window_left": (click.IntRange(min=0), "Keys that a query sees before its own."),
    "window_right": (click.IntRange(min=0), "Keys that a query sees after its own."),
    "softcap": (float, "Scores become softcap * tanh(score / softcap)."),
    "relative_buckets": (click.IntRange(min=0), "Buckets of T5's relative bias."),
    "relative_max_distance": (click.IntRange(min=1), "Distances that share the last bucket."),
    "cache": (click.Choice(CACHES), "KV cache: none, appended to, or buffers written in place."),
    "dtype": (click.Choice(DTYPES), "Of weights, inputs and outputs.  [default: float32]"),
}
SPEC_FLAGS = {
    "cross": "Key and value are inputs of their own.",
    "causal": "Query i sees keys up to P + i only.",
    "alibi": "Scores lose slope * distance, one slope for each head.",
    "packed_qkv": "One projection makes queries, keys and values.",
    "rotary_truncate": "yarn: the ramp begins and ends at whole pairs.",
    "position_ids": "The positions of the queries are an input [B, L].",
    "add_bias_kv": "A learned key and value that every query sees.",
    "add_zero_attn": "A key and value of 0 that every query sees.",
    "sinks": "Each head has a learned score that stands for no key.",
    "attn_weights": "The softmax weights are an output.",
}


def spec_options(command: Command) -> Command:
    """Add one option for each field of AttentionSpec."""
    for name, help_text in reversed(SPEC_FLAGS.items()):
        flag = name.replace("_", "-")
        command = click.option(f"--{flag}/--no-{flag}", default=None, help=help_text)(command)
    for name, (kind, help_text) in reversed(SPEC_OPTIONS.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=help_text)(command)
    return command
