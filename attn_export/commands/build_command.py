"""`attn-export build`: its options, what they define, and the command."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.bundle.manifest import failed_folder
from attn_export.commands.options import (
    PATH,
    SIZE,
    Command,
    budget_option,
    module_option,
    runtime_options,
    with_options,
)
from attn_export.commands.output import Output, output_options
from attn_export.errors import UsageError, WeightsError
from attn_export.spec import VARIANTS, AttentionSpec
from attn_export.spec.fields import FIELDS, TYPES, Field, default_text

if TYPE_CHECKING:
    from attn_export.export.subject import Subject


def _spec_option(name: str, field: Field) -> Callable[[Command], Command]:
    flag, default = name.replace("_", "-"), default_text(name)
    help_text = f"{field.meaning[0].upper()}{field.meaning[1:]}."
    if TYPES[name] == "bool":
        return click.option(f"--{flag}/--no-{flag}", default=None, help=help_text)
    help_text += f"  [default: {default}]" if default else ""
    types: dict[str, Any] = {
        "int": click.IntRange(min=int(field.least or 0)), "float": float, "str": str,
    }  # fmt: skip
    option_type = click.Choice(field.choices) if field.choices else types[TYPES[name]]
    return click.option(f"--{flag}", type=option_type, help=help_text)


SPEC_FIELDS = tuple(name for name, field in FIELDS.items() if field.is_option)
"""The fields of a spec that are options of `build`."""

spec_options = with_options(*(_spec_option(name, FIELDS[name]) for name in SPEC_FIELDS))

GROUPS = {
    "Input": (
        "variant", "module", "weights", "layer", "pool_kv_heads", "kv_scales", "calibrate", "seed",
    ),
    "Fields of the spec": SPEC_FIELDS,
    "Graphs and runtimes": ("dialects", "runtimes", "cpus", "require", "atol", "rtol", "budgets"),
    "Output": (
        "output", "json_file", "junit_file", "html_file", "quiet",
    ),
}  # fmt: skip
"""Names of the parameters of `build` under each heading of its help."""

OTHERS = "Output"
"""The heading for options that `GROUPS` lacks, such as --help."""

EXAMPLES = (
    "attn-export build --variant mqa",
    "attn-export build layer.toml --cache append --dialect ort",
    "attn-export build --weights Llama-3.2-1B --layer 3 --runtime ort-cpu --runtime openvino",
    "attn-export build --module mine.py:subject --output models/mine --junit junit.xml",
)


class _BuildCommand(click.Command):
    """Command whose help lists the options by `GROUPS`, and examples."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of `GROUPS`, then the examples."""
        records = {
            str(param.name): record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([records.pop(name) for name in names])
                if heading == OTHERS:
                    formatter.write_dl(list(records.values()))
        with formatter.section("Examples"):
            for example in EXAMPLES:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


# -- input: a spec, dimensions, a checkpoint, or a module of the user ---------------------------


@dataclasses.dataclass(frozen=True)
class _BuildInput:
    """Options of `build` that define its subject; `changes` are those for fields of the spec."""

    spec_file: Path | None
    variant: str | None
    module: str | None
    weights: Path | None
    layer: str | None
    pool_kv_heads: int | None
    kv_scales: Path | None
    calibrate: Path | None
    seed: int
    changes: Mapping[str, Any]

    @classmethod
    def take_from(cls, options: dict[str, Any]) -> _BuildInput:
        """Remove the options that define the subject from all options of `build`."""
        inputs = {name: options.pop(name) for name in ("spec_file", *GROUPS["Input"])}
        fields = {name: options.pop(name) for name in SPEC_FIELDS}
        changes = {name: value for name, value in fields.items() if value is not None}
        return cls(**inputs, changes=changes)

    @property
    def name(self) -> str:
        """The name of the bundle."""
        if self.module:
            return self.module.rpartition(":")[2]
        if self.spec_file:
            return self.spec_file.stem
        if self.weights:
            path = self.weights.absolute()
            # Most checkpoints are called model.safetensors in a folder with the model's name.
            if path.name.startswith(("model", "config.")):
                return path.parent.name
            return path.name.split(".")[0]
        return self.variant or "attention"

    def check(self) -> None:
        """Raise UsageError if the options contradict each other, or there is nothing to build."""
        sources = [str(source) for source in (self.spec_file, self.variant, self.module) if source]
        if len(sources) > 1:
            raise UsageError(f"{' and '.join(sources)} both define the layer; choose one")
        files = [name for name in ("weights", "kv_scales", "calibrate") if getattr(self, name)]
        if self.module and (self.changes or files):
            names = [*self.changes, *files]
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(f"{flags} with --module {self.module}, which defines it; leave it out")
        for name in files:
            if not Path(getattr(self, name)).exists():
                raise WeightsError(f"{getattr(self, name)} does not exist; check the path")
        for flag, value in (("--layer", self.layer), ("--pool-kv-heads", self.pool_kv_heads)):
            if value is not None and not self.weights:
                raise UsageError(f"{flag} {value} without --weights; name the checkpoint")
        if not (sources or self.changes or self.weights):
            raise UsageError(
                f"nothing to build; give SPEC.toml, --variant {'|'.join(VARIANTS)}, "
                "--weights FILE or --module PATH.py:FUNCTION"
            )

    def read(self) -> AttentionSpec | Callable[[], Subject]:
        """Read the spec, or return a function that imports torch and makes the subject."""
        if self.module:
            from attn_export.export.user_module import check_reference, load_subject

            check_reference(self.module)
            return functools.partial(load_subject, self.module)
        spec = self._spec()
        if self.weights is None:
            spec = spec or AttentionSpec.from_dict(self.changes)
            if not (self.kv_scales or self.calibrate):
                return spec
        else:
            from attn_export.weights.checkpoint import open_layer

            fields = {} if spec else self.changes
            open_layer(self.weights, self.layer, spec, fields, self.pool_kv_heads)
        return functools.partial(self._subject, spec)

    def _subject(self, spec: AttentionSpec | None) -> Subject:
        from attn_export.export.subject import Subject

        scales = {"kv_scales": self.kv_scales, "calibrate": self.calibrate}
        if self.weights is None:
            assert spec is not None
            return Subject.from_spec(spec, seed=self.seed, **scales)
        return Subject.from_checkpoint(
            self.weights, layer=self.layer, spec=spec, pool_kv_heads=self.pool_kv_heads,
            seed=self.seed, **scales, **({} if spec else self.changes),
        )  # fmt: skip

    def _spec(self) -> AttentionSpec | None:
        """Return the spec if the options define one, or None.

        `read` makes a spec of dimensions alone; without them, config.json gives that of --weights.
        """
        if self.spec_file:
            return AttentionSpec.from_toml(self.spec_file, **self.changes)
        if self.variant:
            return AttentionSpec.variant(self.variant, **self.changes)
        # Without these two fields, `changes` are changes to the fields in config.json.
        if self.weights and {"embed_dim", "num_heads"} <= self.changes.keys():
            return AttentionSpec.from_dict(self.changes)
        return None


def _refuse_moved(_: click.Context, option: click.Parameter, value: bool | None) -> None:
    """Refuse an option whose name is that of a command on a bundle."""
    if value is not None:
        flag, command = (option.opts if value else option.secondary_opts)[0], option.opts[0][2:]
        raise UsageError(f"leave out {flag}; after the build, run attn-export {command} BUNDLE")


def _moved_option(flag: str) -> Callable[[Command], Command]:
    return click.option(
        flag, is_flag=True, default=None, hidden=True, expose_value=False, callback=_refuse_moved
    )


# -- the command --------------------------------------------------------------------------------


@click.command("build", cls=_BuildCommand)
@click.argument("spec_file", metavar="[SPEC.toml]", required=False, type=PATH)
@click.option(
    "--variant", metavar="|".join(VARIANTS),
    help="A spec to start from: embed_dim 512, num_heads 8.",
)  # fmt: skip
@spec_options
@module_option
@click.option(
    "--weights", type=PATH, metavar="FILE",
    help="A safetensors checkpoint, its index, or its folder; config.json beside it is read. A "
    "config.json alone gives random weights.",
)  # fmt: skip
@click.option(
    "--layer", metavar="N",
    help="The layer of the checkpoint, or a prefix of tensor names.  [default: 0]",
)  # fmt: skip
@click.option(
    "--pool-kv-heads", type=SIZE, metavar="N",
    help="Mean-pool the key/value heads of the checkpoint to so many.",
)  # fmt: skip
@click.option(
    "--kv-scales", type=PATH, metavar="FILE",
    help="A .npz or .safetensors file with k_scale and v_scale of the cache.",
)  # fmt: skip
@click.option(
    "--calibrate", type=PATH, metavar="FILE",
    help="A file of hidden states, query [B, L, E], from which these scales are "
    "calibrated.  [default: random tokens]",
)  # fmt: skip
@click.option(
    "--dialect", "dialects", multiple=True, metavar="NAME",
    help="standard, portable, ort or cuda; all: each that can express the layer.  [default: all]",
)  # fmt: skip
@runtime_options
@budget_option
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seed of random weights."
)
@click.option("--output", type=PATH, help="The bundle's folder.  [default: models/<name>]")
@_moved_option("--tune")
@_moved_option("--dry-run/--no-dry-run")
@_moved_option("--evidence")
@output_options
def build_command(output: Path | None, destinations: Output, **options: Any) -> int:
    """Build a bundle: export, check, run everywhere, judge.

    The layer comes from SPEC.toml, --variant or dimensions alone, from a checkpoint (--weights), or
    from your file (--module). Options change single fields of the spec.
    """
    from attn_export.commands.build import build

    source = _BuildInput.take_from(options)
    source.check()
    output = output or Path("models") / source.name
    options["dialects"] = options["dialects"] or ("all",)
    with destinations.job(source.name) as bar:
        report = build(
            source.read(), output, name=source.name, seed=source.seed, progress=bar, **options
        )
        bundle = output if report.passed else failed_folder(output)
        if any(verdict.status != "passed" for verdict in report.verdicts):
            from attn_export.commands.explain_failures import explain_failures

            report = explain_failures(report, bundle, progress=bar)
    return destinations.render(report, bundle)
