"""Checkpoints whose linear layers hold integers, or float8, which are never rounded again.

A model of such a checkpoint has the weights that these stand for. `integer_formats` reads
each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from attn_export.errors import WeightsError, counted
from attn_export.parts.whole_models.integer_formats import (
    AWQ,
    GPTQ,
    PACKED,
    PLAIN,
    TENSORS,
    WEIGHT_TYPES,
    IntegerFormat,
    LayerKind,
    check_layer,
    read_weight,
)
from attn_export.quantiser import FLOAT8, QuantisedWeight
from attn_export.weights.source import Stored, TensorSource, listed, read_json, shown

if TYPE_CHECKING:
    from torch import Tensor, nn

_KEY: Final = "quantization_config"
_BESIDE: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which older versions of AutoGPTQ and AutoAWQ keep what config.json lacks."""

_AGAIN: Final = "give the checkpoint in full precision"
_BY_TRANSFORMERS: Final = (
    "load it with AutoModelForCausalLM.from_pretrained, call its dequantize(), and give the folder "
    "that save_pretrained writes"
)
_ADVICE: Final = dict.fromkeys(("bitsandbytes", "mxfp4", "hqq", "quanto"), _BY_TRANSFORMERS)


def integer_format(path: Path) -> IntegerFormat | None:
    """Return how a checkpoint stores integers, by its config.json; None if it holds none."""
    config, old = read_json(path, "the config").get(_KEY), ""
    if config is None:
        old = next((name for name in _BESIDE if (path.parent / name).is_file()), "")
        if not old:
            return None
        path = path.parent / old
        config = read_json(path, "the config of integers")
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: {_KEY} is no object; download it again")
    method = config.get("quant_method", _BESIDE.get(old))
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        advice = _ADVICE.get(method, _AGAIN) if isinstance(method, str) else _AGAIN
        raise WeightsError(
            f"{path}: quant_method {shown(repr(method))} is not read (known: "
            f"{', '.join(_READERS)}); {advice}"
        )
    try:
        return reader(config)
    except ValueError as error:
        raise WeightsError(f"{path}: {_KEY}: {error}; {_AGAIN}") from error


def _kind(config: Mapping[str, Any], bits: str, group: str, needs: Iterable[str] = ()) -> LayerKind:
    """Return what keys of an object say of layers."""
    found, size = config.get(bits), config.get(group, -1)
    _refuse_unknown(bits, found, (4, 8))
    assert isinstance(found, int)
    size = -1 if size is None else size
    if type(size) is not int or not (size == -1 or size > 0):
        raise ValueError(f"{group} is a number of inputs, or -1 for all; got {shown(repr(size))}")
    return LayerKind(found, max(size, 0), frozenset(needs))


def _of_gptq(config: Mapping[str, Any]) -> IntegerFormat:
    version = config.get("checkpoint_format", config.get("format", "gptq"))
    _refuse_unknown("checkpoint_format", version, ("gptq", "gptq_v2"))
    changes = config.get("dynamic") or {}
    if not isinstance(changes, dict) or not all(isinstance(x, dict) for x in changes.values()):
        raise ValueError("dynamic holds no object for each layer")
    kinds = dict[LayerKind, None]()
    for change in ({}, *changes.values()):
        of = {**config, **change}
        needs = ("g_idx",) if of.get("desc_act") and of.get("group_size", -1) != -1 else ()
        kinds[_kind(of, "bits", "group_size", needs)] = None
    return IntegerFormat(GPTQ, tuple(kinds), version == "gptq")


def _of_awq(config: Mapping[str, Any]) -> IntegerFormat:
    _refuse_unknown("version", config.get("version", "gemm"), ("gemm", "GEMM"))
    names = ("w_bit", "q_group_size") if "w_bit" in config else ("bits", "group_size")
    kind = _kind(config, *names)
    _refuse_unknown(names[0], kind.bits, (4,))
    return IntegerFormat(AWQ, (kind,))


def _of_compressed(config: Mapping[str, Any]) -> IntegerFormat:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("config_groups names no weights")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError("config_groups holds no object for each group")
    named = [x.get("format") for x in (config, *groups.values())]
    stored = [name for name in named if name is not None] or [None]
    for name in stored:
        _refuse_unknown("format", name, tuple(_STORED))
    if len(set(stored)) > 1:
        raise ValueError(f"it has several formats ({', '.join(sorted(set(map(str, stored))))})")
    of = _STORED[str(stored[0])]
    activations = ("input_activations", "output_activations")
    rounds_inputs = any(group.get(x) for group in groups.values() for x in activations)
    if rounds_inputs and of != FLOAT8:
        raise ValueError("it rounds inputs of layers as well, which stay in float here")
    kinds = {_of_group(group, is_float=of == FLOAT8): None for group in groups.values()}
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise ValueError(f"{key} changes more than weights")
    sparse = config.get("sparsity_config")
    if isinstance(sparse, dict):
        _refuse_unknown("sparsity_config", sparse.get("format", "dense"), ("dense",))
    if of == PLAIN:  # fewer bits are stored in 8, too
        kinds = {dataclasses.replace(kind, bits=8): None for kind in kinds}
    return IntegerFormat(of, tuple(kinds), rounds_inputs=rounds_inputs)


_STORED: Final = {"pack-quantized": PACKED, "int-quantized": PLAIN, "float-quantized": FLOAT8}
"""The formats of compressed-tensors."""


def _of_group(group: Mapping[str, Any], *, is_float: bool) -> LayerKind:
    """Return what a group of a config of compressed-tensors says of layers."""
    weights, wanted = group.get("weights"), "float" if is_float else "int"
    if not isinstance(weights, dict) or weights.get("type", "int") != wanted:
        raise ValueError(f"config_groups has weights that are no {wanted}, as its format says")
    strategy = weights.get("strategy") or "group"
    if is_float:
        _refuse_unknown("num_bits", weights.get("num_bits"), (8,))
        _refuse_unknown("strategy", strategy, ("tensor", "channel", "block"))
        if strategy == "block":
            return _of_blocks("block_structure", weights)
        return LayerKind(8, 0, outputs=int(strategy == "channel"))
    _refuse_unknown("strategy", strategy, ("group", "channel", "tensor"))
    needs = [] if weights.get("symmetric", True) else ["weight_zero_point"]
    needs += ["weight_g_idx"] if weights.get("actorder") == "group" else []
    size = weights.get("group_size") if strategy == "group" else -1
    return _kind({**weights, "group_size": size}, "num_bits", "group_size", needs)


def _of_fp8(config: Mapping[str, Any]) -> IntegerFormat:
    _refuse_unknown("fmt", config.get("fmt", "e4m3"), ("e4m3",))
    has_blocks = config.get("weight_block_size") is not None
    kind = _of_blocks("weight_block_size", config) if has_blocks else LayerKind(8, 0, outputs=0)
    return IntegerFormat(FLOAT8, (kind,), rounds_inputs=True)


def _of_blocks(name: str, config: Mapping[str, Any]) -> LayerKind:
    """Return how layers of float8 are stored whose scales are those of blocks `[out, in]`."""
    sizes = config.get(name)
    if not isinstance(sizes, list) or [type(x) for x in sizes] != [int, int] or min(sizes) < 1:
        raise ValueError(f"{name} is two sizes, as [128, 128]; got {shown(repr(sizes))}")
    return LayerKind(8, sizes[1], outputs=sizes[0])


def _refuse_unknown(name: str, value: object, known: tuple[object, ...]) -> None:
    if not any(type(value) is type(each) and value == each for each in known):
        told = ", ".join(map(str, known))
        raise ValueError(f"{name} {shown(repr(value))} is not read (known: {told})")


_READERS: Final = {
    "gptq": _of_gptq, "awq": _of_awq, "compressed-tensors": _of_compressed, "fp8": _of_fp8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class IntegerSource(TensorSource):
    """A checkpoint in which each layer of integers has a ``.weight``.

    Attributes:
        of: How layers are stored.
        layers: The paths of those of integers.
        plain: The tensors of the files.
        weights: The weights that were read, by the name that they have here.
    """

    of: IntegerFormat
    layers: frozenset[str]
    plain: TensorSource
    weights: dict[str, QuantisedWeight] = dataclasses.field(default_factory=dict)

    def describe(self, names: Iterable[str]) -> dict[str, Stored]:
        """Return the shape and dtype of some tensors; weights of integers are float32."""
        names = list(names)
        described = self.plain.describe(name for name in names if not self._is_stored(name))
        for name in filter(self._is_stored, names):
            described[name] = Stored(self._check(name)[1], "F32")
        return described

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return some tensors; weights of integers as what these stand for, float32."""
        import torch

        names = list(names)
        tensors = self.plain.read(name for name in names if not self._is_stored(name))
        for name in filter(self._is_stored, names):
            weight = self.weights[name] = self._read_weight(name)
            tensors[name] = torch.from_numpy(weight.by_output())
        return tensors

    def _is_stored(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.layers

    def _check(self, name: str) -> tuple[dict[str, str], tuple[int, int]]:
        """Return the names of the tensors of a weight by part, and its shape `[out, in]`."""
        prefix = name.removesuffix(".weight")
        names = {part: f"{prefix}.{part}" for part in TENSORS[self.of.name]}
        names = {part: full for part, full in names.items() if full in self.plain.files}
        described = self.plain.describe(names.values())
        stored = {part: described[full] for part, full in names.items()}

        def weight_shape() -> list[int]:
            full = names["weight_shape"]
            return list(map(int, self.plain.read([full])[full]))

        try:
            return names, check_layer(self.of, stored, weight_shape)
        except ValueError as error:
            raise self._wrong(prefix, error) from error

    def _read_weight(self, name: str) -> QuantisedWeight:
        names, _ = self._check(name)
        tensors = self.plain.read(names.values())
        try:
            return read_weight(self.of, {part: tensors[full] for part, full in names.items()})
        except ValueError as error:
            raise self._wrong(name.removesuffix(".weight"), error) from error

    def _wrong(self, prefix: str, error: ValueError) -> WeightsError:
        return WeightsError(
            f"{self.path}: {shown(prefix)} is no layer of {self.of.name}: {shown(str(error))}; "
            f"download it again, or {_AGAIN}"
        )

    def zero_biases(self, names: Iterable[str]) -> set[str]:
        """Return which of some tensors are biases of 0, which AutoGPTQ adds to all its layers."""
        biases = [
            name for name in names
            if name.endswith(".bias") and name.removesuffix(".bias") in self.layers
        ]  # fmt: skip
        return {name for name, tensor in self.plain.read(biases).items() if not tensor.any()}

    def keep(self, model: nn.Module) -> None:
        """Keep the integers for `integers_of` a model with these weights."""
        from torch import nn

        base, found = getattr(model, "base_model_prefix", ""), dict[str, QuantisedWeight]()
        left = list[str]()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, weight in self.weights.items():
            own = next((x for x in (name, f"{base}.{name}", name.removeprefix(f"{base}."))
                        if x in parameters), "")  # fmt: skip
            if not own:  # in a tensor of several, as experts
                left.append(name)
                continue
            layer = model.get_submodule(own.removesuffix(".weight"))
            if not isinstance(layer, nn.Linear) or not _is_same(parameters[own], weight):
                raise WeightsError(
                    f"{self.path}: {shown(name)} holds integers, and in the model it is no linear "
                    f"layer of its own; {_AGAIN}"
                )
            found[own] = weight
        kinds: Iterable[LayerKind] = self.of.kinds
        if self.of.name != FLOAT8:
            read = self.weights.values()
            kinds = {LayerKind(x.bits, x.block if x.is_blocked else 0): None for x in read}
        note = (
            f"{counted(len(self.weights), 'weight')} are the "
            f"{'numbers' if self.of.name == FLOAT8 else 'integers'} of the checkpoint "
            f"({self.of.name}: {', '.join(map(str, kinds))}), not rounded again"
        )
        if self.of.rounds_inputs:
            note += "; inputs of their products, which its config rounds to float8, stay float32"
        if left:
            note += f"; dequantised in graphs, as the model joins them: {listed(sorted(left))}"
        _KEPT[model] = ModelIntegers(found, note)


@dataclasses.dataclass(frozen=True)
class ModelIntegers:
    """The integers of the checkpoint that a model was loaded from.

    Attributes:
        weights: Those of linear layers, by the names of the model's parameters.
        note: A note on all of them.
    """

    weights: Mapping[str, QuantisedWeight]
    note: str


def _is_same(parameter: Tensor, weight: QuantisedWeight) -> bool:
    import torch

    return torch.equal(parameter, torch.from_numpy(weight.by_output()))


_KEPT: WeakKeyDictionary[nn.Module, ModelIntegers] = WeakKeyDictionary()


def integers_of(model: nn.Module) -> ModelIntegers | None:
    """Return the integers of the checkpoint that a model was loaded from, if it has any."""
    return _KEPT.get(model)


def with_integers(source: TensorSource, of: IntegerFormat) -> IntegerSource:
    """Return a checkpoint in which layers of integers have weights."""
    mark, dtype = TENSORS[of.name][0], WEIGHT_TYPES.get(of.name)
    marked = [name for name in source.files if name.endswith(f".{mark}")]
    if dtype:  # floating weights have the same name
        types, scales = source.describe(marked), tuple(f".{x}" for x in TENSORS[of.name][1:3])
        marked = [name for name in marked if types[name].dtype == dtype]
        marked += [name for name in source.files if name.endswith(scales)]
    layers = frozenset(name.rpartition(".")[0] for name in marked)
    lacking = sorted(layer for layer in layers if f"{layer}.{mark}" not in source.files)
    if lacking:
        raise WeightsError(
            f"{source.path}: {listed([f'{layer}.{mark}' for layer in lacking])} is missing, and "
            f"its config says {of.name}; download it again, or {_AGAIN}"
        )
    if not layers:
        raise WeightsError(
            f"{source.path} holds no {mark}{f' of {dtype}' if dtype else ''}, and its config says "
            f"{of.name}; {_AGAIN}"
        )
    parts = {f"{layer}.{part}" for layer in layers for part in TENSORS[of.name]}
    files = {name: file for name, file in source.files.items() if name not in parts}
    twice = [f"{layer}.weight" for layer in layers if f"{layer}.weight" in files]
    if twice:
        raise WeightsError(
            f"{source.path} holds both integers and floats for {listed(sorted(twice))}; {_AGAIN}"
        )
    files |= {f"{layer}.weight": source.files[f"{layer}.{mark}"] for layer in sorted(layers)}
    return IntegerSource(source.path, files, of, layers, source)
