"""Optional parts of the package: each folder here is one, and may be removed.

A part imports the core. The core imports no part: it reads `PART` of each folder that is there, and
imports a module of a part when it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

from attn_export.errors import UsageError
from attn_export.system_info import check_installed


class ModelKeywords(TypedDict, total=False):
    """How a whole model is built, beside what every build takes."""

    adapter: Path | str | None
    all_logits: bool
    cache: str
    kv_dtype: str
    layers: str
    max_len: int
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
        recognises: The module that replaces other forms of attention by `Attention` nodes. It holds
            `recognise(model, dialect, observed)`.
        runtimes: The module of each runtime. It holds its class as `RUNTIME`, or
            `runtimes_of(name)`, which returns those that a name stands for. If the name is a form,
            it holds `listed()`, too, which yields those to list, each with what is said of it.
        references: The module of each runtime that the name ``"all"`` does not stand for.
        installs: The module that installs what has a name. It holds `install(name, say)`.
        verifies: The module with what `verify` asks of signatures: `attested`, as
            in `commands/attestation`.
        compares: The module that judges graphs of whole models. It holds
            `compare_models(model, graphs, run, layout=, names=, output=)`.
        builds: The module that makes subjects of whole models. It holds
            `subject_of_model(model, **options)` with `ModelKeywords`.
        generates: The module that continues prompts with a whole model. It holds
            `generate(session, ids, count, …)`, as `DecodeSession.generate` calls it.
        overflows: The module that says why a graph overflows. It holds
            `overflow_notes(path, sets)`, which returns notes for inputs by name.
        kinds: The module of each `kind` of layer other than softmax. It holds `make_layer(spec)`.
        captures: The module that replaces functions which a user's module calls while it is
            captured. It holds `capturing(module)`, a context.
        translates: The module with PyTorch code of operators and functions of others, by name. It
            holds `TRANSLATIONS`.
        operators: The module that computes further operators in float64. It holds `OPERATORS`.
        lowers: The module that replaces the nodes of an operator of ai.onnx in a dialect. It holds
            `lower(model, dialect)`.
        faults: Modules of further known faults: `KNOWN`, as in `explain/match`.
        tests_need: The names of what the part's tests need to be installed.
    """

    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dialects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recognises: str = ""
    runtimes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    installs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verifies: str = ""
    compares: str = ""
    builds: str = ""
    generates: str = ""
    overflows: str = ""
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    captures: str = ""
    translates: str = ""
    operators: str = ""
    lowers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    faults: Sequence[str] = ()
    tests_need: Sequence[str] = ()


def runtimes_in(package: str, file: str) -> dict[str, str]:
    """Return the modules beside a package's own file, by the runtimes that they are named after."""
    names = sorted(path.stem for path in Path(file).parent.glob("[!_]*.py"))
    return {name.replace("_", "-"): f"{package}.{name}" for name in names}


@functools.cache
def parts() -> tuple[Part, ...]:
    """Return the parts whose folders are there, in the order of their names."""
    names = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
    return tuple(import_module(f"{__name__}.{name}").PART for name in names)


def models_module(field: str, needs: Sequence[str] = ("torch", "transformers")) -> Any:
    """Return the module that a part names in a field on whole models.

    `needs`: The packages that must be installed for it.
    """
    name = next((getattr(part, field) for part in parts() if getattr(part, field)), None)
    if name is None:
        raise UsageError("whole models need the part whole_models; install attn-export whole")
    for package in needs:
        check_installed(package)
    return import_module(name)


def module_of(name: str, modules: Mapping[str, str]) -> Any:
    """Return the first of the modules whose name fits, imported; None if none fits."""
    for form, module in modules.items():
        if fnmatchcase(name, re.sub("[A-Z]+", "*", form)):
            return import_module(module)
    return None
