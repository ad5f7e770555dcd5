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
from attn_export.spec.fields import FIELDS, TYPES, Field, default_text

if TYPE_CHECKING:
    from attn_export.export.subject import Subject


Command = Callable[..., Any]

PATH = click.Path(path_type=Path)
"""The type of an argument or option that is passed to the command as a `Path`."""

SIZE = click.IntRange(min=1)

quiet_option = click.option("--quiet", is_flag=True, help="Print errors only.")


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, whose help lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def json_option(help_text: str) -> Callable[[Command], Command]:
    """Return the option --json; its value is a file name, or - for stdout."""
    return click.option("--json", "json_file", metavar="FILE", help=help_text)


module_option = click.option(
    "--module", metavar="PATH.py:FUNCTION", help="A function that returns a Subject of your own."
)


def runtime_options(command: Command) -> Command:
    """Add the options --runtime, --cpu, --require, --atol and --rtol.

    The command gets the values of --cpu as further names in `runtimes`.
    """

    @functools.wraps(command)
    def merged(*, runtimes: tuple[str, ...], cpus: tuple[str, ...], **values: Any) -> Any:
        if cpus:
            from attn_export.runtimes.emulated_cpu import BASE, emulated_runtimes

            runtimes = (*(runtimes or (BASE,)), *emulated_runtimes(cpus))
        return command(runtimes=runtimes, **values)

    add = with_options(
        click.option(
            "--runtime", "runtimes", multiple=True, metavar="NAME",
            help="A runtime to run; all; -NAME leaves one out of all.  "
            "[default: ort-cpu, and ort-cuda where there is a GPU]",
        ),
        click.option(
            "--cpu", "cpus", multiple=True, metavar="NAME",
            help="An emulated CPU to run ort-cpu on: neoverse-n1, haswell, …; all.",
        ),
        click.option(
            "--require", multiple=True, metavar="NAME", help="Fail if this runtime cannot run."
        ),
        click.option(
            "--atol", type=click.FloatRange(min=0),
            help="Also fail where |runtime - eager| > atol + rtol * |eager|.",
        ),
        click.option("--rtol", type=click.FloatRange(min=0), help="Relative part of --atol."),
    )  # fmt: skip
    return add(merged)


budget_option = click.option(
    "--budget", "budgets", multiple=True, metavar="MEASURE>=N",
    help="Fail where quantised weights leave less: sqnr>=30 (dB), cosine>=0.99, row<=0.1, "
    "kl<=0.01 (nats), top1>=0.99.  [default: by weights-dtype]",
)  # fmt: skip


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
        "output", "tune", "dry_run", "evidence", "json_file", "junit_file", "html_file", "quiet",
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


class BuildCommand(click.Command):
    """Command whose help lists the options by `GROUPS`, and examples."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of `GROUPS`, then the examples.

        Args:
            ctx: The context of the command.
            formatter: The formatter to write to.
        """
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


def size_options(prefill: str) -> Callable[[Command], Command]:
    """Return a decorator that adds --batch, --prefill and --decode.

    Args:
        prefill: The default of --prefill, as text for the help.
    """
    return with_options(
        click.option(
            "--batch", type=SIZE, multiple=True, metavar="B", help="Batch sizes.  [default: 1]"
        ),
        click.option(
            "--prefill", type=SIZE, multiple=True, metavar="L",
            help=f"New tokens without a past.  [default: {prefill}]",
        ),
        click.option(
            "--decode", type=click.IntRange(min=2), multiple=True, metavar="S",
            help="Keys that one new token sees, its own included.  [default: 2048, with a cache]",
        ),
    )  # fmt: skip


# -- input of `build`: a spec, dimensions, a checkpoint, or a module of the user ----------------


Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BuildInput:
    """Options of `build` that define its subject."""

    spec_file: Path | None
    variant: str | None
    module: str | None
    weights: Path | None
    layer: str | None
    pool_kv_heads: int | None
    kv_scales: Path | None
    calibrate: Path | None

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
            return (
                path.parent.name
                if path.name.startswith(("model", "config."))
                else path.name.split(".")[0]
            )
        return self.variant or "attention"

    def check(self, changes: Fields) -> None:
        """Check that the options do not contradict each other.

        Args:
            changes: The options for single fields of the spec.

        Raises:
            UsageError: If they do, or if there is nothing to build.
        """
        sources = [str(source) for source in (self.spec_file, self.variant, self.module) if source]
        if len(sources) > 1:
            raise UsageError(f"{' and '.join(sources)} are sources; choose one")
        files = [name for name in ("weights", "kv_scales", "calibrate") if getattr(self, name)]
        if self.module and (changes or files):
            names = [*changes, *files]
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(
                f"{flags} with --module {self.module}, which brings its own; leave it out"
            )
        for flag, value in (("--layer", self.layer), ("--pool-kv-heads", self.pool_kv_heads)):
            if value is not None and not self.weights:
                raise UsageError(f"{flag} {value} without --weights; name the checkpoint")
        if not (sources or changes or self.weights):
            raise UsageError(
                "nothing to build; give SPEC.toml, --variant mha|mqa|gqa, --weights FILE or "
                "--module PATH.py:FUNCTION"
            )

    def read(self, changes: Fields, progress: Progress, seed: int) -> AttentionSpec | Subject:
        """Read the spec, checkpoint or module.

        Args:
            changes: The options for single fields of the spec.
            progress: Receiver of progress.
            seed: The seed of random weights, for a spec with scales or a config.json alone.

        Raises:
            AttnExportError: If the input cannot be read, or contradicts the options.
        """
        if self.module:
            progress.phase("importing torch")
            from attn_export.user_module import load_subject

            return load_subject(self.module)
        spec = self._spec(changes)
        scales = {"kv_scales": self.kv_scales, "calibrate": self.calibrate}
        if self.weights is None and not any(scales.values()):
            return spec or AttentionSpec.from_dict(changes)
        progress.phase("reading the checkpoint" if self.weights else "importing torch")
        from attn_export.export.subject import Subject

        if self.weights is None:
            spec = spec or AttentionSpec.from_dict(changes)
            return Subject.from_spec(spec, seed=seed, **scales)
        return Subject.from_checkpoint(
            self.weights,
            layer=self.layer,
            spec=spec,
            pool_kv_heads=self.pool_kv_heads,
            seed=seed,
            **scales,
            **({} if spec else changes),
        )

    def _spec(self, changes: Fields) -> AttentionSpec | None:
        """Return the spec if the options define one, or None.

        Without SPEC.toml and --variant, dimensions define a spec only beside --weights.
        """
        if self.spec_file:
            return AttentionSpec.from_toml(self.spec_file, **changes)
        if self.variant:
            return AttentionSpec.variant(self.variant, **changes)
        # Without these two fields, `changes` are changes to the fields in config.json.
        if self.weights and {"embed_dim", "num_heads"} <= changes.keys():
            return AttentionSpec.from_dict(changes)
        return None


def limit_own_memory() -> None:
    """Limit the memory of this process, like that of the runtimes' processes.

    A graph from elsewhere may need values of any size. With the limit, a command that evaluates
    such a graph ends with an error. Without it, the system might kill any other process.
    """
    from attn_export.runtimes.ipc import limit_memory
    from attn_export.runtimes.protocol import Limits

    limit_memory(Limits.default().memory_mib or 0)
