"""The config of a whole model's checkpoint: only what its class reads reaches transformers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import WeightsError, nearest, one_line
from attn_export.weights.source import listed, read_json, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_CODE = re.compile(
    r"auto_map|attribute_map|custom_\w+|use_kernels?|kernel_config|adapters?|_auto_class"
    r"|use_(timm|pretrained)_backbone|quantization_config"
)
"""Keys that ask for code, for weights of a hub, or for a meaning of keys that would hide these."""

_IMPLEMENTATION = re.compile(r"_*(attn|experts)_implementation\w*")
"""Keys that name functions of transformers, which are chosen here, or kernels of a hub."""

_MODELS = re.compile(r"MODEL_\w*MAPPING_NAMES")
"""transformers' tables of classes of models by type."""

_OF_TRANSFORMERS = frozenset({
    "model_type", "architectures", "torch_dtype", "rope_theta", "rope_scaling", "num_labels",
    "partial_rotary_factor", "rope_parameters", "output_attentions", "per_layer_config",
})  # fmt: skip
"""Keys that transformers reads for every class, beside the fields of the class."""

_IGNORED = frozenset({"transformers_version", "_name_or_path", "use_cache", "_commit_hash"})
"""Keys without an effect on numbers."""

_DTYPES = ("float32", "float16", "bfloat16")

_MOST = 2**40
"""The largest size in a config: products of a few such numbers stay exact in float64."""


def config_of(
    path: Path, notes: list[str], *, is_base: bool = False
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the config in a config.json, and the class of the model that it names.

    `is_base`: Whether the class is that of the model without a head, whichever is named.
    """
    from transformers import CONFIG_MAPPING

    values = read_json(path, "the config")
    values.pop("quantization_config", None)  # `integer_format` reads it
    for key, value in _items_of(values):
        _refuse_code(path, key, value)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = nearest(str(kind), CONFIG_MAPPING.keys())
        end = near and f"; {near}"
        raise WeightsError(f"{path}: model_type {shown(repr(kind))} is none of transformers'{end}")
    named = _base_of(path, kind) if is_base else values.get("architectures")
    architecture = _architecture(path, kind, named)
    cleaned = _known(path, CONFIG_MAPPING[kind], architecture, values, notes)
    try:
        return CONFIG_MAPPING[kind](**cleaned), architecture
    except Exception as error:  # the classes have validators of their own
        raise WeightsError(f"{path} is no config of {kind}: {one_line(error)}") from error


def _items_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the keys of an object and of those within it, with their values."""
    if isinstance(value, dict):
        yield from value.items()
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _items_of(inner)


def _refuse_code(path: Path, key: str, value: Any) -> None:
    if value and key == "quantization_config":
        raise WeightsError(
            f"{path} has a quantization_config; give the checkpoint in full precision"
        )
    if _IMPLEMENTATION.fullmatch(key):
        # Kernels of a hub are named by its repository.
        named = [value, *(inner for _, inner in _items_of(value))]
        value = any(isinstance(x, str) and not re.fullmatch(r"\w*", x) for x in named)
    elif not _CODE.fullmatch(key):
        return
    if value:
        raise WeightsError(f"{path} asks for code by {shown(key)}; remove it if you trust it")


def _architecture(path: Path, kind: str, named: object) -> type[PreTrainedModel]:
    """Return the class that config.json names, if transformers has it for this type of model."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    names = {
        name
        for table, mapping in vars(modeling_auto).items() if _MODELS.fullmatch(table)
        for name in _names(mapping.get(kind))
    }  # fmt: skip
    first = named[0] if isinstance(named, list) and named else named
    is_name = isinstance(first, str) and re.fullmatch(r"[A-Za-z]\w*", first)
    found: Any = _class_of(kind, str(first)) if is_name else None
    # Models of the text of a type with towers are in no table.
    is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    if is_name and first in names and not is_model:
        lacking = listed(getattr(found, "_backends", ()))
        raise WeightsError(
            f"{path}: {first} needs {lacking}, which is not installed; install it" if lacking else
            f"{path}: transformers {transformers.__version__} names {first} as a model of {kind}, "
            "and has no such class; install a version that has it"
        )  # fmt: skip
    fits = first in names or found.config_class is CONFIG_MAPPING[kind] if is_model else False
    if not fits:
        raise WeightsError(
            f"{path}: architectures must name a model of {kind} ({listed(sorted(names))}); got "
            f"{shown(repr(first))}"
        )
    architecture: type[PreTrainedModel] = found
    return architecture


def _base_of(path: Path, kind: str) -> str:
    """Return the name of the class of a type's model without a head."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named = _names(MODEL_MAPPING_NAMES.get(kind))
    if not named or CONFIG_MAPPING[kind]().is_encoder_decoder:
        raise WeightsError(f"{path}: pooling of a {kind} is not supported; give an encoder")
    return named[0]


def _class_of(kind: str, name: str) -> Any:
    """Return what transformers calls so: for all to import, or in the file of this type's models.

    If a package is missing that the class needs, it is no model.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    place = CONFIG_MAPPING[kind].__module__.replace(".configuration_", ".modeling_")
    if hasattr(transformers, name) or importlib.util.find_spec(place) is None:
        return getattr(transformers, name, None)
    return getattr(importlib.import_module(place), name, None)


def _names(value: str | Sequence[str] | None) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value or ()


def _known(
    path: Path, kind: type[PreTrainedConfig], architecture: type[PreTrainedModel],
    values: Mapping[str, Any], notes: list[str], within: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the values that a class of configs or the model's code reads, and note the others."""
    from transformers import CONFIG_MAPPING

    classes: tuple[Any, ...] = kind, architecture, architecture.config_class or kind
    sources = (inspect.getsource(sys.modules[each.__module__]) for each in classes)
    read = set(re.findall(r"[a-z]\w*", " ".join(sources))) - _of_classes()
    read |= kind.attribute_map.keys() | _OF_TRANSFORMERS
    read |= {field.name for field in dataclasses.fields(kind)}
    known = {
        key: _plain(value)
        for key, value in values.items()
        if key in read and key not in _IGNORED and not key.startswith("_")
    }
    for key, value in known.items():
        if key in ("dtype", "torch_dtype") and value not in (None, *_DTYPES):
            raise WeightsError(
                f"{path}: {within}{key} must be {', '.join(_DTYPES)}; got {shown(repr(value))}"
            )
        if isinstance(value, int) and abs(value) > _MOST:
            raise WeightsError(f"{path}: {within}{key} must be at most {_MOST}; got {value}")
        inner = kind.sub_configs.get(key)
        if inner is not None and isinstance(value, dict):
            named = str(value.get("model_type"))
            # Its `get` finds only classes that were asked for before.
            if named in CONFIG_MAPPING:
                inner = CONFIG_MAPPING[named]
            if not hasattr(inner, "attribute_map"):  # a class for any type
                raise WeightsError(
                    f"{path}: {within}{key} must have a model_type of transformers'; got "
                    f"{shown(repr(named))}"
                )
            known[key] = _known(path, inner, architecture, value, notes, f"{within}{key}.")
    others = sorted(
        key for key in values.keys() - known.keys() - _IGNORED if not key.startswith("_")
    )
    if others:
        notes.append(
            f"config.json: {within}{kind.__name__} does not read {listed(others)}; left out"
        )
    return known


@functools.cache
def _of_classes() -> frozenset[str]:
    """Return the names of what all classes of configs have beside their fields, as methods."""
    from transformers import PreTrainedConfig

    fields = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return frozenset(dir(PreTrainedConfig)) - fields - _OF_TRANSFORMERS


def _plain(value: Any) -> Any:
    """Return a value as transformers reads it; objects within it without what no config holds."""
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {
        key: _plain(inner)
        for key, inner in value.items()
        if not key.startswith("_") and key not in _of_classes()
    }
