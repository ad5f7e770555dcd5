"""The input of `build`: options that define the layer, and what they define."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attn_export.commands.options import (
    Command,
    Option,
    check_folders,
    model_option,
    module_option,
    option,
    pairs,
    removed_option,
    with_options,
)
from attn_export.errors import UsageError
from attn_export.spec import VARIANTS, AttentionSpec
from attn_export.spec.fields import FIELDS, TYPES, Field, default_text

if TYPE_CHECKING:
    from attn_export.export.subject import Subject


def _spec_option(name: str, field: Field) -> Option:
    flag, default = name.replace("_", "-"), default_text(name)
    help_text = f"{field.meaning[0].upper()}{field.meaning[1:]}."
    if TYPES[name] == "bool":
        return option(f"--{flag}/--no-{flag}", default=None, help=help_text)
    help_text += f"  [default: {default}]" if default else ""
    settings: dict[str, dict[str, Any]] = {
        "int": {"type": int, "least": int(field.least or 0)}, "float": {"type": float}, "str": {},
    }  # fmt: skip
    limits = {"choices": field.choices} if field.choices else settings[TYPES[name]]
    return option(f"--{flag}", help=help_text, **limits)


_SPEC_FIELDS = tuple(name for name, field in FIELDS.items() if field.is_option)
"""The fields of a spec that are options of `build`."""

INPUT = (
    option(
        "--variant", metavar="|".join(VARIANTS),
        help="A spec to start from: embed_dim 512, num_heads 8.",
    ),
    module_option,
    model_option,
    option(
        "--all-logits", is_flag=True,
        help="With --model: return the logits of all new tokens; there is no logit_index.",
    ),
    option(
        "--layers", metavar="A-B",
        help="With --model: a part of a decoder, its layers from A to B, counted from 0.",
    ),
    option(
        "--max-len", type=int, least=16, metavar="N",
        help="With --model: the most tokens of a decoder's cache.  [default: its positions]",
    ),
    option(
        "--adapter", type=Path, metavar="FOLDER",
        help="With --model: a LoRA adapter as peft saves it, merged into the weights.",
    ),
    option(
        "--text-only", is_flag=True,
        help="With --model: leave out what the graphs lack, such as towers of images.",
    ),
    option(
        "--pool-kv-heads", type=int, least=1, metavar="N",
        help="With --module: mean-pool the key/value heads of an nn.MultiheadAttention to so many.",
    ),
    option(
        "--accuracy-level", type=int, metavar="4|1",
        help="With --model and weights of integers: whether products in the ort dialect round "
        "their inputs to 8 bits (4) or not (1).  [default: 4]",
    ),
    option(
        "--keep", metavar="NAME,…",
        help="With --model and --weights-dtype: modules whose weights stay floating, or get other "
        "integers, as lm_head,layers.0=int8.",
    ),
    option(
        "--inputs", multiple=True, metavar="FILE",
        help="With --model: prompts of your own as cases, which --budget is then about: ids in "
        "FILE.json, text in FILE.txt, or FILE.npz by name.",
    ),
    option(
        "--rounding", metavar="search|nearest",
        help="With --model and --weights-dtype int4: scales with the least squared error in each "
        "block, or those that clip nothing.  [default: search]",
    ),
    option(
        "--fit", is_flag=True,
        help="With --model and --weights-dtype: leave the fewest bytes of weights in 8 bits, or "
        "floating, with which --budget holds.",
    ),
    option(
        "--kv-dtype", metavar="float16",
        help="With --model: the type of a decoder's caches.  [default: that of the model]",
    ),
    option(
        "--seed", type=int, least=0, most=2**63 - 1, default=0, help="Seed of random weights."
    ),
)  # fmt: skip

GROUPS = {
    "Input": (
        "spec_file", "variant", "module", "model", "adapter", "all_logits", "layers", "max_len",
        "text_only", "pool_kv_heads", "kv_dtype", "accuracy_level", "keep", "fit", "rounding",
        "inputs", "seed", "fields",
    ),
    "Fields of the spec": _SPEC_FIELDS,
    "Graphs and runtimes": (
        "dialects", "runtimes", "cpus", "require", "atol", "rtol", "budgets", "memory", "whole",
    ),
    "Output": ("output", "json_file", "junit_file", "html_file", "quiet", "verbose"),
}  # fmt: skip
"""Names of the parameters of `build` under each heading of its help."""

EXAMPLES = (
    "build --variant mqa",
    "build layer.toml --set cache=append --dialect ort",
    "build Llama-3.2-1B/config.json --cache append --runtime ort-cpu --runtime openvino",
    "build --module mine.py:subject -o models/mine --junit junit.xml",
    "build --model tiny-llama --runtime ort-cpu",
)

SHORT = (
    "spec_file", "variant", "module", "model", "fields", "dialects", "runtimes",
    "require", "output", "html_file", "quiet",
)  # fmt: skip
"""The parameters that --help lists, of more than 70."""

_OF_MODELS = frozenset({"cache", "dtype", "weights_dtype"})
"""The fields of a spec that --model takes as well."""

_ONLY_OF_MODELS = (
    "accuracy_level", "adapter", "all_logits", "fit", "inputs", "keep", "kv_dtype", "layers",
    "max_len", "rounding", "text_only",
)  # fmt: skip
"""The options that only --model takes."""

Buildable: TypeAlias = "Subject | AttentionSpec | Callable[[], Subject]"


def input_options(command: Command) -> Command:
    """Add the options that define the layer; the command gets it as `name` and `subject`."""

    @functools.wraps(command)
    def merged(spec_file: Path | None, **values: Any) -> Any:
        names = [str(each.names[0]).removeprefix("--").replace("-", "_") for each in INPUT]
        given = {"spec_file": spec_file, **{name: values.pop(name) for name in names}}
        options = {name: values.pop(name) for name in _SPEC_FIELDS}
        changes = {name: value for name, value in options.items() if value is not None}
        for name, text in values.pop("fields").items():
            if name in changes:
                raise UsageError(f"--set {name}={text} and its own option both set it; choose one")
            changes[name] = _value(text)
        if given["kv_dtype"] and not given["model"]:
            changes["kv_dtype"] = given.pop("kv_dtype")
            given["kv_dtype"] = None
        _check(given, changes)
        return command(
            name=_name(given), subject=_read(given, changes), seed=given["seed"], **values
        )

    spec_file = option("spec_file", metavar="[SPEC.toml|config.json]", required=False, type=Path)
    fields = (_spec_option(name, FIELDS[name]) for name in _SPEC_FIELDS)
    return with_options(spec_file, *INPUT, _SET, *fields, *_REMOVED)(merged)


_REMOVED = [
    *(
        removed_option(flag, "a layer has no caches or activations of few bits")
        for flag in ("--activations", "--calibrate", "--kv-scale", "--kv-scales")
    ),
    *(
        removed_option(flag, "use build --model FOLDER --layers 3-3")
        for flag in ("--weights", "--layer")
    ),
]


_SET = option(
    "--set", "fields", multiple=True, metavar="FIELD=VALUE", callback=pairs,
    help="A field of the spec, as in num_heads=8 or causal=true. Each has an option of its own "
    "as well; docs/spec.md has all fields.",
)  # fmt: skip


def _value(text: str) -> object:
    """Return the value of a field in TOML, or else the text itself: names need no quotes."""
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except ValueError:  # no TOML, or further lines with fields of their own
        return text
    return value


def _name(given: Mapping[str, Any]) -> str:
    """Return the name of the bundle."""
    if given["module"]:
        return str(given["module"]).rpartition(":")[2]
    if given["spec_file"]:
        path = given["spec_file"].absolute()
        return str(path.parent.name if path.name == "config.json" else path.stem)
    if given["model"]:
        return str(given["model"].absolute().name)
    return given["variant"] or "attention"


def _check(given: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raise UsageError if the options contradict each other, or there is nothing to build."""
    kinds = ("spec_file", "variant", "module", "model")
    sources = [str(given[name]) for name in kinds if given[name]]
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)} both define the layer; choose one")
    whole = next((name for name in ("module", "model") if given[name]), None)
    taken = {"weights_dtype"} if given["module"] else _OF_MODELS
    others = changes.keys() - taken
    if whole and others:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise UsageError(f"{flags} with --{whole} {given[whole]}, which defines it; leave it out")
    check_folders(model=given["model"], adapter=given["adapter"])
    for name in _ONLY_OF_MODELS:
        if given[name] and not given["model"]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} without --model; name the checkpoint")
    if given["pool_kv_heads"] and not given["module"]:
        raise UsageError(
            f"--pool-kv-heads {given['pool_kv_heads']} without --module; name a function that "
            "returns an nn.MultiheadAttention"
        )
    if not (sources or changes):
        raise UsageError(
            f"nothing to build; give SPEC.toml, --variant {'|'.join(VARIANTS)}, "
            "--module PATH.py:FUNCTION or --model FOLDER"
        )


def _read(given: Mapping[str, Any], changes: Mapping[str, Any]) -> Buildable:
    """Read the spec, or return a function that imports torch and makes the subject."""
    if given["module"]:
        from attn_export.export.user_module import check_reference, load_subject

        check_reference(given["module"])
        dtype = changes.get("weights_dtype", "none")
        load = functools.partial(load_subject, given["module"], given["pool_kv_heads"])
        return load if dtype == "none" else lambda: load().with_weights(str(dtype))
    if given["model"]:

        def of_model() -> Subject:
            from attn_export.export.subject import Subject

            options = {name: given[name] for name in _ONLY_OF_MODELS if given[name]}
            return Subject.from_model(given["model"], **options, **dict(changes))

        return of_model
    if given["variant"]:
        return AttentionSpec.variant(given["variant"], **changes)
    if not given["spec_file"]:
        return AttentionSpec.from_dict(changes)
    if given["spec_file"].suffix != ".json":
        return AttentionSpec.from_toml(given["spec_file"], **changes)
    from attn_export.weights.from_config import spec_of_config

    return spec_of_config(given["spec_file"], fields=changes)
