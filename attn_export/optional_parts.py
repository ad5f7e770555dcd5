"""What the parts that are there add to the core, by the `PART` of each folder of `parts/`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

from attn_export.errors import UsageError
from attn_export.system_info import check_installed


class ModelKeywords(TypedDict, total=False):
    """How a whole model is built, beside what every build takes."""

    accuracy_level: int | None
    adapter: Path | str | None
    all_logits: bool
    cache: str
    fit: bool
    inputs: Sequence[Any]
    keep: str | Mapping[str, str]
    kv_dtype: str
    layers: str
    max_len: int
    rounding: str
    text_only: bool
    weights_dtype: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Part:
    """What a part adds to the core: modules by name.

    Capital letters in a name stand for any text, as in ``NAME==VERSION``.

    Attributes:
        commands: The module of each command. It holds `NAME_command`.
        dialects: The module that rewrites graphs to a dialect. It holds `rewrite(model)`.
        runtimes: The module of each runtime. It holds its class as `RUNTIME`, or
            `runtimes_of(name)`, which returns those that a name stands for. If the name is a form,
            it holds `listed()`, too, which yields those to list, each with what is said of it.
        references: The module of each runtime that the name ``"all"`` does not stand for.
        installs: The module that installs what has a name. It holds `install(name, say)`.
        hooks: The module that holds each of `HOOKS` that the part has, under the hook's name.
        tests_need: The names of what the part's tests need to be installed.
    """

    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dialects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runtimes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    installs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hooks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tests_need: Sequence[str] = ()


HOOKS = {
    "recognise": "replaces other forms of attention by nodes: `(model, dialect, observed)`",
    "lower_newer": "replaces nodes of operators newer than opset 24: `(model, dialect)`",
    "LAYERS": "the class of the layer of each `kind` other than softmax",
    "capturing": "replaces functions that a user's module calls in its capture: `(module)`",
    "TRANSLATIONS": "PyTorch code of operators and functions of other libraries, by name",
    "OPERATORS": "the classes that compute further operators in float64",
    "KNOWN": "further known faults, as in `explain/match`",
    "overflow_notes": "says why a graph overflows: `(path, inputs by name of some cases)`",
    "attested": "what `verify` asks of signatures, as in `commands/verify`",
    "subject_of_model": "makes the subject of a whole model: `(model, **ModelKeywords)`",
    "compare_models": "judges graphs of a whole model, as in `commands/compare`",
    "compare_quantised": "judges a quantised graph of a module by budgets, likewise",
    "generate": "continues prompts: `(session, ids, count, …)`, as `DecodeSession.generate`",
}
"""What a part may put in at a place of the core, and what that is."""


def runtimes_in(package: str, file: str) -> dict[str, str]:
    """Return the modules beside a package's own file, by the runtimes that they are named after."""
    names = sorted(path.stem for path in Path(file).parent.glob("[!_]*.py"))
    return {name.replace("_", "-"): f"{package}.{name}" for name in names}


@functools.cache
def parts() -> tuple[Part, ...]:
    """Return the parts whose folders are there, in the order of their names."""
    folder = Path(__file__).parent / "parts"
    names = sorted(file.parent.name for file in folder.glob("*/__init__.py"))
    return tuple(import_module(f"{__package__}.parts.{name}").PART for name in names)


def hooks(name: str) -> Iterator[Any]:
    """Yield what each part has for one of `HOOKS`, whose module is then imported."""
    for part in parts():
        if name in part.hooks:
            yield getattr(import_module(part.hooks[name]), name)


def model_hook(name: str, needs: Sequence[str] = ("torch", "transformers")) -> Any:
    """Return a hook on whole models, for which packages must be installed."""
    if not any(name in part.hooks for part in parts()):
        raise UsageError("whole models need the part whole_models; install attn-export whole")
    for package in needs:
        check_installed(package)
    return next(hooks(name))


def module_of(name: str, modules: Mapping[str, str]) -> Any:
    """Return the first of the modules whose name fits, imported; None if none fits."""
    for form, module in modules.items():
        if fnmatchcase(name, re.sub("[A-Z]+", "*", form)):
            return import_module(module)
    return None
