"""The command line: its commands, and errors in one line."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from attn_export.commands.options import USES, Command, Option
from attn_export.errors import (
    INTERRUPTED,
    READER_GONE,
    AttnExportError,
    UsageError,
    choose,
    lacking,
    nearest,
    one_line,
    printable,
)
from attn_export.interruption import MESSAGE
from attn_export.output_folder import check_utf8
from attn_export.system_info import missing_package

_TRACEBACK = "ATTN_EXPORT_TRACEBACK"
"""The environment variable that makes internal errors end in a traceback."""

_HELP = ("-h", "--help")

_ALL = f"{__name__}.all"
"""The key in a context of click that makes help list all options."""

_TRY = """\
attn-export: say what to do. For example:
  attn-export build --variant mqa                        build and judge an attention layer
  attn-export build --model FOLDER                       build and judge a whole model
  attn-export compare --model FOLDER --graphs FOLDER     judge graphs that somebody exported
  attn-export verify BUNDLE                              judge a bundle again, as in CI
attn-export --help lists all commands, and attn-export COMMAND --help has examples."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Errors are one line on stderr."""
    try:
        _check_paths(arguments)
        code = cli.main(list(arguments), prog_name="attn-export", standalone_mode=False)
    except AttnExportError as error:
        return _complain(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(_TRY if error.ctx.parent is None else error.format_message(), err=True)
        return UsageError.exit_code
    except click.ClickException as error:
        return _complain(error.format_message(), UsageError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain(MESSAGE, INTERRUPTED)
    except (BrokenPipeError, SystemExit):
        # The reader of stdout has ended, as in `attn-export … | head`. click and rich raise
        # SystemExit for it, and for nothing else.
        return READER_GONE
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        return _complain(*_unexpected(error))
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error that is not raised on purpose."""
    if lacking(error) == "memory":
        return "there is too little memory; raise the limit (ulimit -v)", AttnExportError.exit_code
    if lacking(error) == "threads":
        return "there are too few threads; raise the limit (ulimit -u)", AttnExportError.exit_code
    if isinstance(error, OSError):
        return f"the operating system reports: {one_line(error)}", UsageError.exit_code
    if isinstance(error, ModuleNotFoundError):
        return missing_package((error.name or "").partition(".")[0]), UsageError.exit_code
    message = f"internal error: {one_line(error)}; report it with the output of {_TRACEBACK}=1"
    return message, AttnExportError.exit_code


def _check_paths(arguments: Sequence[str]) -> None:
    """Check that all paths are UTF-8, which engines and file formats need."""
    for text in arguments:
        check_utf8(text)
    if set(_HELP) & set(arguments):
        return
    with contextlib.suppress(FileNotFoundError):  # these folders may be missing
        check_utf8(Path.cwd())
        check_utf8(tempfile.gettempdir())


def _complain(message: str, code: int) -> int:
    click.echo(f"attn-export: {printable(message)}", err=True)
    return code


_EXIT_CODES = {
    0: "passed", 1: "too little memory, too few threads, or an internal error", 2: "wrong usage",
    3: "the export failed", 4: "a graph was refused", 5: "a runtime failed or is missing",
    6: "parity mismatch", 7: "the bundle is damaged or not signed", INTERRUPTED: "interrupted",
}  # fmt: skip

# -- commands ------------------------------------------------------------------------

COMMANDS = ("build", "check", "compare", "explain", "lower", "runtimes", "verify")
"""The commands of the core. The module of each has its name."""

_REMOVED = {
    "evidence": "report.json has what it stated",
    "site": "sweep --json writes every cell",
    "tune": "build writes ONNX Runtime's kernels, and bench measures them",
}
"""The commands of earlier versions, each with what to do instead."""


def _of_parts() -> dict[str, str]:
    """Return the module of each command of a part. Commands of the core load no part."""
    from attn_export.optional_parts import parts

    return {name: module for part in parts() for name, module in part.commands.items()}


class Commands(click.Group):
    """Group of all commands, which imports a command's module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted({*COMMANDS, *_of_parts()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported only now; None if there is none of this name."""
        if cmd_name not in self.commands:
            is_own = cmd_name in COMMANDS
            module = f"{__package__}.{cmd_name}" if is_own else _of_parts().get(cmd_name)
            if cmd_name in _REMOVED:
                raise UsageError(f"{cmd_name} was removed in 0.3.0; {_REMOVED[cmd_name]}")
            if module:
                found = getattr(import_module(module), f"{cmd_name.replace('-', '_')}_command")
                self.add_command(_click_command(cmd_name, found))
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names, and the words behind it."""
        if self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            raise UsageError(
                f"unknown command {printable(args[0], 60)!r}; {choose(args[0], known)}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence on each command, under the headings of their uses."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        for use in USES:
            listed = [
                (name, (command.help or "").partition("\n\n")[0].replace("\n", " "))
                for name, command in found
                if isinstance(command, _HelpfulCommand) and command.use == use
            ]
            if listed:
                with formatter.section(use):
                    formatter.write_dl(listed)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in _EXIT_CODES.items()])


class _HelpfulCommand(click.Command):
    """Command whose help lists the options by groups, if it has any, then examples."""

    def __init__(
        self,
        use: str,
        examples: Sequence[str],
        groups: Mapping[str, Sequence[str]],
        short: Sequence[str],
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.use = use
        self._examples, self._groups, self._short = examples, groups, short
        if short:
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
                    callback=self._show_all, help="Show all options and exit.",
                )
            )  # fmt: skip

    def _show_all(self, ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_ALL] = True
            click.echo(self.get_help(ctx))
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings; those of no group are in the last."""
        groups = self._groups or {"Options": ()}
        grouped = {name for names in groups.values() for name in names}
        records = {
            str(param.name): record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        others = [name for name in records if name not in grouped]
        short = None if _ALL in ctx.meta or not self._short else {*self._short, *others}
        for heading, names in groups.items():
            listed = [*names, *others] if heading == [*groups][-1] else names
            shown = [name for name in listed if short is None or name in short]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl([records[name] for name in shown])
        with formatter.section("Examples"):
            for example in self._examples:
                formatter.write(f"{'':>{formatter.current_indent}}attn-export {example}\n")


def _click_command(name: str, function: Command) -> click.Command:
    """Return the command of a function with its options."""
    found = function.__dict__
    return _HelpfulCommand(
        found["use"], found["examples"], found["groups"], found["short"],
        name=name, callback=function, help=function.__doc__,
        params=[_parameter(option) for option in found.get("options", ())],
    )  # fmt: skip


class _Choice(click.Choice):  # type: ignore[type-arg]
    """A choice whose message on an unknown value names the nearest known one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        message = super().get_invalid_choice_message(value, ctx)
        near = nearest(str(value), map(str, self.choices))
        return f"{message.rstrip('.')}; {near}" if near else message


def _parameter(option: Option) -> click.Parameter:
    settings = dict(option.settings)
    kind, limits = settings.get("type"), [settings.pop(name, None) for name in ("least", "most")]
    if kind is Path:
        settings["type"] = click.Path(path_type=Path)
    elif limits != [None, None]:
        settings["type"] = (click.IntRange if kind is int else click.FloatRange)(*limits)
    elif choices := settings.pop("choices", ()):
        settings["type"] = _Choice(choices)
    is_flag = option.names[0].startswith("-")
    return (click.Option if is_flag else click.Argument)(list(option.names), **settings)


@click.group(cls=Commands, context_settings={"help_option_names": _HELP, "max_content_width": 100})
@click.version_option(package_name="attn-export")
def cli() -> None:
    """Export PyTorch attention to ONNX, and check that runtimes compute the same."""
