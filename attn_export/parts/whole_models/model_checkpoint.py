"""Checkpoints of whole models, as transformers' `save_pretrained` writes them.

Nothing of a checkpoint is executed: keys of config.json that ask for code are refused, others that
the model's class does not read are left out, and only safetensors files are handed to transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import WeightsError, one_line
from attn_export.runtimes.protocol import Limits
from attn_export.temp_folders import scratch
from attn_export.weights.source import (
    CONFIG,
    Stored,
    TensorSource,
    listed,
    open_source,
    read_json,
    shown,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

_CODE = re.compile(
    r"auto_map|attribute_map|custom_\w+|use_kernels?|kernel_config|adapters?|_auto_class"
    r"|use_(timm|pretrained)_backbone|quantization_config"
)
"""Keys that ask for code, for weights of a hub, or for a meaning of keys that would hide these."""

_IMPLEMENTATION = re.compile(r"_*(attn|experts)_implementation\w*")
"""Keys that name functions of transformers, which are chosen here, or kernels of a hub."""

_OF_TRANSFORMERS = frozenset({
    "model_type", "architectures", "torch_dtype", "rope_theta", "rope_scaling", "num_labels",
    "partial_rotary_factor", "rope_parameters", "output_attentions", "per_layer_config",
})  # fmt: skip
"""Keys that transformers reads for every class, beside the fields of the class."""

_IGNORED = frozenset({"transformers_version", "_name_or_path", "use_cache", "_commit_hash"})
"""Keys without an effect on numbers."""

_LAYERS = re.compile(r"(num_|n_|num_hidden_|encoder_|decoder_|num_encoder_|num_decoder_)layers?")
"""The keys of numbers of layers."""

_DTYPES = ("float32", "float16", "bfloat16")

_MOST = 2**40
"""The largest size in a config: products of a few such numbers stay exact in float64."""

_BYTES = 12
"""The bytes of memory for each weight: in float32 the model, the graph, and what a runtime makes of
it."""

_SPARE = 2**27
"""Elements that a model may hold beside those of its files: tables of positions, tied weights."""


@dataclasses.dataclass(frozen=True)
class _ModelCheckpoint:
    """A checkpoint of a whole model.

    Attributes:
        config: The config, of a class of transformers.
        architecture: The class of the model.
        source: Its tensors.
        elements: The number of weights.
        notes: What was left out of config.json.
    """

    folder: Path
    config: PreTrainedConfig
    architecture: type[PreTrainedModel]
    source: TensorSource
    elements: int
    notes: tuple[str, ...] = ()

    def load(self) -> PreTrainedModel:
        """Return the model in its type, for evaluation, with every tensor from the files."""
        self._refuse_too_large()
        # As Any: types of transformers lack the pair that `output_loading_info` gives.
        transformers: Any = import_module("transformers")
        architecture: Any = self.architecture
        try:
            with _quiet(), scratch() as folder:
                # Without what else lies in the folder: adapters, code, generation settings.
                for name, file in _linked(self.source).items():
                    (folder / name).symlink_to(file.absolute())
                result = architecture.from_pretrained(
                    folder, config=self.config, dtype=self.config.dtype, use_safetensors=True,
                    local_files_only=True, attn_implementation="eager", output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    generation_config=transformers.GenerationConfig(),  # else it opens a file
                )  # fmt: skip
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
            raise WeightsError(
                f"transformers cannot load {self.folder}: {one_line(error)}"
            ) from error
        model, found = result
        self._refuse_others(found)
        model.set_experts_implementation("eager")  # the others have no float64
        model.eval()
        loaded: PreTrainedModel = model
        return loaded

    def _refuse_too_large(self) -> None:
        memory = Limits.default().memory_mib
        needed = self.elements * _BYTES >> 20
        if memory is not None and needed > memory:
            raise WeightsError(
                f"{self.folder}: {self.elements:.3g} weights need about {needed / 1024:.0f} GiB of "
                f"memory, and at most {memory / 1024:.0f} GiB are used here; take a larger machine"
            )

    def _refuse_others(self, found: Mapping[str, Iterable[Any]]) -> None:
        """Refuse missing tensors, which transformers would draw, and those that do not fit."""
        for kind, verb in (
            ("missing_keys", "lacks"),
            ("unexpected_keys", "has, and its config does not,"),
            ("mismatched_keys", "has in another shape"),
            ("error_msgs", "cannot convert"),
        ):
            names = sorted(str(x[0] if isinstance(x, tuple) else x) for x in found.get(kind) or ())
            if names:
                raise WeightsError(
                    f"{self.folder} {verb} {len(names)} tensors of {self.architecture.__name__}: "
                    f"{listed(names)}; give the checkpoint of this config"
                )


def read_checkpoint(folder: Path) -> _ModelCheckpoint:
    """Read the config and the headers of a checkpoint; refuse what asks for code, or lies.

    No tensor is read, and no memory is taken that the files do not justify.
    """
    source = open_source(folder)
    notes: list[str] = []
    config, architecture = config_of(folder / CONFIG, notes)
    stored = source.describe(source.files)
    elements = _bound(folder, config, architecture, stored)
    return _ModelCheckpoint(folder, config, architecture, source, elements, tuple(notes))


def config_of(path: Path, notes: list[str]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the config in a config.json, and the class of the model that it names."""
    from transformers import CONFIG_MAPPING

    values = read_json(path, "the config")
    for key, value in _items_of(values):
        _refuse_code(path, key, value)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise WeightsError(f"{path}: model_type {shown(repr(kind))} is none of transformers'")
    architecture = _architecture(path, kind, values.get("architectures"))
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
    from transformers.models.auto import modeling_auto

    names = {
        name
        for table, mapping in vars(modeling_auto).items() if table.endswith("MAPPING_NAMES")
        for name in _names(mapping.get(kind))
    }  # fmt: skip
    first = named[0] if isinstance(named, list) and named else named
    if not isinstance(first, str) or first not in names:
        raise WeightsError(
            f"{path}: architectures must name a model of {kind} ({listed(sorted(names))}); got "
            f"{shown(repr(first))}"
        )
    found: type[PreTrainedModel] = getattr(transformers, first)
    return found


def _names(value: str | Sequence[str] | None) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value or ()


def _known(
    path: Path, kind: type[PreTrainedConfig], architecture: type[PreTrainedModel],
    values: Mapping[str, Any], notes: list[str], within: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the values that a class of configs or the model's code reads, and note the others."""
    from transformers import CONFIG_MAPPING

    sources = (inspect.getsource(sys.modules[each.__module__]) for each in (kind, architecture))
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
            named = value.get("model_type")
            # Its `get` finds only classes that were asked for before.
            inner = CONFIG_MAPPING[named] if str(named) in CONFIG_MAPPING else inner
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


def _bound(
    folder: Path, config: PreTrainedConfig, architecture: type[PreTrainedModel],
    stored: Mapping[str, Stored],
) -> int:  # fmt: skip
    """Return the number of weights; refuse a config that describes more than the files hold."""
    import torch

    for key, value in config.to_dict().items():
        if _LAYERS.fullmatch(key) and isinstance(value, int) and value > len(stored):
            raise WeightsError(
                f"{folder}: {key} is {value}, and its files hold {len(stored)} tensors"
            )
    held = sum(math.prod(each.shape) for each in stored.values())
    try:
        with torch.device("meta"):
            model = architecture(config)
    except Exception as error:  # as various as the models
        raise WeightsError(f"{folder}: no model of this config: {one_line(error)}") from error
    described = _elements(model)
    if described > 2 * held + _SPARE:
        raise WeightsError(
            f"{folder}: its config describes {described} numbers, and its files hold {held}"
        )
    return described


def _elements(model: nn.Module) -> int:
    return sum(x.numel() for x in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing: what it reports is raised."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _linked(source: TensorSource) -> dict[str, Path]:
    """Return the names under which transformers finds the files of a checkpoint."""
    if source.path.suffix == ".json":
        files = dict.fromkeys(source.files.values())
        links = {file.relative_to(source.path.parent).as_posix(): file for file in files}
        return {"model.safetensors.index.json": source.path, **links}
    return {"model.safetensors": source.path}
