"""Options that several commands share, and the input of `build`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.errors import UsageError
from attn_export.report.progress import Progress
from attn_export.spec import AttentionSpec
from attn_export.spec.rules import CACHES, DTYPES, NORMS, ROTARIES, ROTARY_SCALINGS

if TYPE_CHECKING:
    from attn_export.export.subject import Subject


Command = Callable[..., Any]


def runtime_options(command: Command) -> Command:
    """Add the options --runtime, --cpu, --require, --atol and --rtol; a CPU is one more runtime."""

    @functools.wraps(command)
    def merged(*, runtimes: tuple[str, ...], cpus: tuple[str, ...], **given: Any) -> Any:
        if cpus:
            from attn_export.runtimes.emulated_cpu import BASE, emulated

            runtimes = (*(runtimes or (BASE,)), *emulated(cpus))
        return command(runtimes=runtimes, **given)

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
            "--cpu", "cpus", multiple=True, metavar="NAME",
            help="An emulated CPU to run ort-cpu on: neoverse-n1, haswell, …; all.",
        ),
        click.option(
            "--runtime", "runtimes", multiple=True, metavar="NAME",
            help="A runtime to run; all; -NAME leaves one out of all.  "
            "[default: ort-cpu, and ort-cuda where there is a GPU]",
        ),
    ):  # fmt: skip
        merged = option(merged)
    return merged


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


# -- input of `build`: a spec, dimensions, a checkpoint, or a module of the user's --------------


Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BuildInput:
    """Origin of the subject; the options of `build` by their names."""

    spec_file: Path | None
    variant: str | None
    module: str | None
    weights: Path | None
    layer: str | None
    pool_kv_heads: int | None

    @property
    def name(self) -> str:
        """The name of the bundle."""
        if self.module:
            return self.module.rpartition(":")[2]
        if self.spec_file:
            return self.spec_file.stem
        if self.weights:
            path = self.weights.absolute()
            # Most checkpoints are called model.safetensors; their folder says which model.
            return path.parent.name if path.name.startswith("model") else path.name.split(".")[0]
        return self.variant or "attention"

    def check(self, changes: Fields) -> None:
        """Refuse options that contradict each other.

        Raises:
            UsageError: If so, or if there is nothing to build.
        """
        given = [str(source) for source in (self.spec_file, self.variant, self.module) if source]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given; choose one")
        if self.module and (changes or self.weights):
            names = [*changes, *(["weights"] if self.weights else [])]
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(
                f"{flags} with --module {self.module}, which brings its own; leave it out"
            )
        for flag, value in (("--layer", self.layer), ("--pool-kv-heads", self.pool_kv_heads)):
            if value is not None and not self.weights:
                raise UsageError(f"{flag} {value} without --weights; name the checkpoint")
        if not (given or changes or self.weights):
            raise UsageError(
                "nothing to build; give SPEC.toml, --variant mha|mqa|gqa, --weights FILE or "
                "--module PATH.py:FUNCTION"
            )

    def read(self, changes: Fields, progress: Progress) -> AttentionSpec | Subject:
        """Read the spec, checkpoint or module.

        Args:
            changes: Single fields of the spec.
            progress: Receiver of progress.

        Raises:
            AttnExportError: If it cannot be read, or contradicts its description.
        """
        if self.module:
            progress.phase("importing torch")
            from attn_export.user_module import load_subject

            return load_subject(self.module)
        spec = self._spec(changes)
        if self.weights is None:
            return spec or AttentionSpec.from_dict(changes)
        progress.phase("reading the checkpoint")
        from attn_export.export.subject import Subject

        return Subject.from_checkpoint(
            self.weights,
            layer=self.layer,
            spec=spec,
            pool_kv_heads=self.pool_kv_heads,
            **({} if spec else changes),
        )

    def _spec(self, changes: Fields) -> AttentionSpec | None:
        """Return the given spec; None if only dimensions are given or the weights define it."""
        if self.spec_file:
            return AttentionSpec.from_toml(self.spec_file, **changes)
        if self.variant:
            return AttentionSpec.variant(self.variant, **changes)
        # Both are needed for a spec; without them they are changes to what config.json says.
        if self.weights and {"embed_dim", "num_heads"} <= changes.keys():
            return AttentionSpec.from_dict(changes)
        return None


def limit_own_memory() -> None:
    """Limit the memory that this process may allocate, as that of the runtimes is limited.

    A graph from elsewhere may ask for values of any size. A command that evaluates it then ends
    with an error, before the system kills a process of its own choice.
    """
    from attn_export.runtimes.ipc import limit_memory
    from attn_export.runtimes.protocol import Limits

    limit_memory(Limits.default().memory_mib or 0)
