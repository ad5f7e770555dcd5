"""Folders of sentence-transformers: the modules that `modules.json` names, read as plain data.

Nothing of a folder is executed, and weights are safetensors. What is unknown is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from attn_export.bundle.text_inputs import VECTOR
from attn_export.errors import WeightsError, one_line
from attn_export.untrusted_files import checked, parse_json, read_text
from attn_export.weights.source import CONFIG, listed, open_source, shown, stays_inside

if TYPE_CHECKING:
    import torch

    from attn_export.parts.whole_models.sentence_model import Dense, SentenceModel

MODULES = "modules.json"
"""The file that makes a folder one of sentence-transformers."""

_ALONE = f"remove {MODULES} to take the transformer alone"

_Text = Annotated[str, Meta(max_length=400)]
_Width = Annotated[int, Meta(ge=1, le=2**20)]


class _Module(Struct, frozen=True):
    """An entry of `modules.json`."""

    type: _Text
    path: _Text = ""
    kwargs: object = None

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.type.rpartition(".")[2]


class _TransformerConfig(Struct, frozen=True):
    """A config of `Transformer`."""

    transformer_task: _Text = "feature-extraction"


class _PoolingConfig(Struct, frozen=True):
    """A config of `Pooling`: `pooling_mode`, or a flag for each mode as older releases wrote."""

    pooling_mode: _Text | Annotated[tuple[_Text, ...], Meta(min_length=1, max_length=10)] | None = (
        None
    )
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of poolings, in the order of the vector."""
        if self.pooling_mode is not None:
            return (
                self.pooling_mode if isinstance(self.pooling_mode, tuple) else (self.pooling_mode,)
            )
        flags = {
            "cls": self.pooling_mode_cls_token, "max": self.pooling_mode_max_tokens,
            "mean": self.pooling_mode_mean_tokens,
            "mean_sqrt_len_tokens": self.pooling_mode_mean_sqrt_len_tokens,
            "weightedmean": self.pooling_mode_weightedmean_tokens,
            "lasttoken": self.pooling_mode_lasttoken,
        }  # fmt: skip
        return tuple(name for name, is_on in flags.items() if is_on) or ("mean",)


class _LayerConfig(Struct, frozen=True):
    """A config of `Dense` or `Normalize`."""

    in_features: _Width = 1
    out_features: _Width = 1
    bias: bool = True
    activation_function: _Text | None = "torch.nn.modules.activation.Tanh"
    module_input_name: _Text = VECTOR
    module_output_name: _Text | None = None
    use_residual: bool = False


@dataclasses.dataclass(frozen=True)
class SentenceFolder:
    """A folder of sentence-transformers.

    Attributes:
        transformer: The folder of the transformer's checkpoint.
        modes: The poolings.
        layers: The folder and the config of each layer on the vector, by its name.
    """

    transformer: Path
    modes: tuple[str, ...]
    layers: Mapping[str, tuple[Path, _LayerConfig]]

    def wrapped(self, transformer: Any) -> SentenceModel:
        """Return the whole model around its transformer, in the type of that."""
        from attn_export.parts.whole_models.sentence_model import Normalize, Pooling, SentenceModel

        self._check_widths(transformer)
        after = {
            name: _dense(path, config, transformer.dtype) if name.startswith("dense") else
            Normalize()
            for name, (path, config) in self.layers.items()
        }  # fmt: skip
        return SentenceModel(transformer, Pooling(self.modes), after).eval()

    def _check_widths(self, transformer: Any) -> None:
        """Refuse layers that do not take what the ones before them give."""
        width = transformer.config.get_text_config().hidden_size * len(self.modes)
        for name, (path, config) in self.layers.items():
            if name.startswith("dense"):
                if config.in_features != width:
                    raise WeightsError(
                        f"{path / CONFIG}: in_features is {config.in_features}, and what comes "
                        f"before it gives {width}; give the folder as it was saved"
                    )
                width = config.out_features


def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """Return what a folder of sentence-transformers holds; None if it is none, or a classifier."""
    path = folder / MODULES
    if not path.is_file():
        return None
    modules = _read(path, tuple[_Module, ...])
    kinds = [each.kind for each in modules]
    for each in modules:
        place = folder / each.path
        if each.path and not stays_inside(each.path):
            raise WeightsError(f"{path}: {shown(each.path)!r} is no folder inside it; {_ALONE}")
        known = each.type.startswith("sentence_transformers.")
        if not known or each.kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise WeightsError(
                f"{path}: {shown(each.type)} is not supported, and no code of a folder is run; "
                f"{_ALONE}"
            )
        if each.kwargs:
            raise WeightsError(f"{path}: {place} takes kwargs, which is not supported; {_ALONE}")
    task = _task(folder / modules[0].path) if modules else ""
    if kinds == ["Transformer"] and task == "sequence-classification" and not modules[0].path:
        return None  # a cross encoder, which is a checkpoint as any other
    if kinds[:2] != ["Transformer", "Pooling"] or {"Transformer", "Pooling"} & {*kinds[2:]}:
        raise WeightsError(
            f"{path} has {listed(kinds)}; supported are Transformer, Pooling, and then Dense and "
            f"Normalize; {_ALONE}"
        )
    if task != "feature-extraction":
        raise WeightsError(f"{path}: transformer_task {shown(task)!r} is not supported; {_ALONE}")
    layers: dict[str, tuple[Path, _LayerConfig]] = {}
    for number, each in enumerate(modules[2:], start=2):
        layers[f"{each.kind.lower()}_{number}"] = _layer(folder / each.path, each.kind)
    return SentenceFolder(folder / modules[0].path, _modes(folder / modules[1].path), layers)


def _task(folder: Path) -> str:
    """Return what the transformer is for; older releases do not say it."""
    path = folder / "sentence_bert_config.json"
    config: _TransformerConfig = (
        _read(path, _TransformerConfig) if path.is_file() else (_TransformerConfig())
    )
    return config.transformer_task


def _modes(folder: Path) -> tuple[str, ...]:
    from attn_export.parts.whole_models.sentence_model import POOLINGS

    config: _PoolingConfig = _read(folder / CONFIG, _PoolingConfig)
    for mode in config.modes:
        if mode not in POOLINGS:
            raise WeightsError(
                f"{folder / CONFIG}: pooling_mode {shown(mode)!r} is none of {listed(POOLINGS)}; "
                f"{_ALONE}"
            )
    if not config.include_prompt:
        raise WeightsError(
            f"{folder / CONFIG}: include_prompt is false, and a graph does not know how long a "
            f"prompt is; {_ALONE}"
        )
    return config.modes


def _layer(folder: Path, kind: str) -> tuple[Path, _LayerConfig]:
    from attn_export.parts.whole_models.sentence_model import ACTIVATIONS

    path = folder / CONFIG
    # Older releases save none of Normalize.
    config = _read(path, _LayerConfig) if kind == "Dense" or path.is_file() else _LayerConfig()
    name = config.activation_function
    if name is not None and name not in ACTIVATIONS:
        raise WeightsError(
            f"{path}: activation_function {shown(name)!r} is none of {listed(ACTIVATIONS)}; "
            f"{_ALONE}"
        )
    ends = {config.module_input_name, config.module_output_name or config.module_input_name}
    if ends != {VECTOR} or config.use_residual:
        what = "use_residual" if config.use_residual else listed(sorted(ends - {VECTOR}))
        raise WeightsError(f"{path}: {what} is not supported; {_ALONE}")
    return folder, config


def _dense(folder: Path, config: _LayerConfig, dtype: torch.dtype) -> Dense:
    """Return a linear layer with the weights of its folder, in a type."""
    from attn_export.parts.whole_models.sentence_model import ACTIVATIONS, Dense

    source = open_source(folder)
    sizes = config.out_features, config.in_features
    expected = {"linear.weight": sizes} | ({"linear.bias": sizes[:1]} if config.bias else {})
    found = {name: each.shape for name, each in source.describe(source.files).items()}
    if found != expected:
        raise WeightsError(
            f"{source.path} holds {_shapes(found)}, and its config says {_shapes(expected)}; give "
            "the folder as it was saved"
        )
    weights = {name: x.to(dtype) for name, x in source.read(source.files).items()}
    name = config.activation_function or "torch.nn.modules.linear.Identity"
    return Dense(weights["linear.weight"], weights.get("linear.bias"), ACTIVATIONS[name]())


def _shapes(tensors: Mapping[str, tuple[int, ...]]) -> str:
    return listed(f"{name} {list(shape)}" for name, shape in tensors.items())


def _read(path: Path, schema: Any) -> Any:
    """Return the content of a JSON file that fits a schema."""
    try:
        return checked(parse_json(read_text(path)), schema)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(
            f"{path} is not as sentence-transformers writes it: {one_line(error)}"
        ) from error
