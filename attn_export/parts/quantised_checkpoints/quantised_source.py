"""Checkpoints with packed integers, presented as checkpoints with plain weights.

Integers are read as they are and never quantised again. `integer_formats` reads each format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attn_export.errors import SpecError, WeightsError
from attn_export.parts.quantised_checkpoints.integer_formats import (
    AWQ,
    GPTQ,
    MARKS,
    TENSORS,
    check_layer,
    read_weight,
)
from attn_export.quantiser import QuantisedWeight
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import PROJECTIONS
from attn_export.weights.config import Config
from attn_export.weights.source import Stored, TensorSource, bracketed, shown

if TYPE_CHECKING:
    from torch import Tensor

SEPARATE: Final = tuple(f"{name}_proj.weight" for name in PROJECTIONS)
"""Weights, by our names, that a checkpoint may store as integers."""


@dataclasses.dataclass(frozen=True, slots=True)
class _QuantisedSource(TensorSource):
    """A checkpoint in which each packed linear layer has a ``.weight``.

    Attributes:
        bits: The bits of an integer in config.json; None if it does not state them.
        zeros_minus_one: Whether GPTQ's zero points are stored minus 1, as in its first version.
    """

    packed: Mapping[str, str]
    plain: TensorSource
    bits: int | None
    zeros_minus_one: bool

    def describe(self, names: Iterable[str]) -> dict[str, Stored]:
        """Return the shape and dtype of some tensors; packed weights are float32 `[out, in]`."""
        names = list(names)
        described = self.plain.describe(name for name in names if not self.is_packed(name))
        for name in filter(self.is_packed, names):
            described[name] = Stored(self._check(name)[1], "F32")
        return described

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return some tensors; packed weights are dequantised."""
        import torch

        names = list(names)
        tensors = self.plain.read(name for name in names if not self.is_packed(name))
        for name in filter(self.is_packed, names):
            tensors[name] = torch.from_numpy(self._read_weight(name).dequantised().T.copy())
        return tensors

    def integers(
        self, ours: Mapping[str, str], spec: AttentionSpec, kv_heads: int | None
    ) -> tuple[AttentionSpec, dict[str, QuantisedWeight]]:
        """Return the spec with the fields on the integers, and these by our names."""
        packed = {name: weight for name, weight in ours.items() if self.is_packed(name)}
        for name, weight in packed.items():
            if weight not in SEPARATE or spec.packed_qkv:
                raise WeightsError(
                    f"{self.path}: {shown(name)} is quantised and holds several projections in "
                    "one, which is not supported; give a checkpoint in float"
                )
        integers = {weight: self._read_weight(name) for name, weight in packed.items()}
        return (self._spec_with(integers, spec, kv_heads) if integers else spec), integers

    def _spec_with(
        self, integers: Mapping[str, QuantisedWeight], spec: AttentionSpec, kv_heads: int | None
    ) -> AttentionSpec:
        if kv_heads is not None:
            raise WeightsError(
                f"{self.path} holds integers, which have no mean; leave pool_kv_heads out"
            )
        if spec.weights_dtype != "none":
            raise WeightsError(
                f"{self.path} holds integers, and weights_dtype is {spec.weights_dtype!r}; leave "
                "it out: they are taken as they are"
            )
        blocks = {weight.block if weight.is_blocked else 0 for weight in integers.values()}
        if len(blocks) > 1:
            raise WeightsError(
                f"{self.path} holds blocks of {', '.join(map(str, sorted(blocks)))} inputs in one "
                "attention, which must be of one size; give a checkpoint in float"
            )
        dtypes = {name.removesuffix("_proj.weight"): w.dtype for name, w in integers.items()}
        is_symmetric = all(weight.zero_points is None for weight in integers.values())
        try:
            return AttentionSpec.from_dict({
                **spec.to_dict(), "block_size": blocks.pop(),
                "weights_dtype": " ".join(f"{name}={d.lstrip('u')}" for name, d in dtypes.items()),
                "scheme": "symmetric" if is_symmetric else "asymmetric",
            })  # fmt: skip
        except SpecError as error:
            raise WeightsError(f"{self.path} holds integers: {error}") from error

    def is_packed(self, name: str) -> bool:
        """Return whether a weight is stored as packed integers."""
        return name.removesuffix(".weight") in self.packed and name.endswith(".weight")

    def _read_weight(self, name: str) -> QuantisedWeight:
        names, _ = self._check(name)
        tensors = self.plain.read(names.values())
        parts = {part: tensors[full] for part, full in names.items()}
        prefix = name.removesuffix(".weight")
        try:
            return read_weight(
                self.packed[prefix], parts,
                stated_bits=self.bits, zeros_minus_one=self.zeros_minus_one,
            )  # fmt: skip
        except ValueError as error:
            raise self._wrong(prefix, f"{error}") from error

    def _check(self, name: str) -> tuple[dict[str, str], tuple[int, int]]:
        """Return the names of the tensors of a packed weight by part, and its shape `[out, in]`."""
        prefix = name.removesuffix(".weight")
        format_name = self.packed[prefix]
        names = {part: f"{prefix}.{part}" for part in TENSORS[format_name]}
        names = {part: full for part, full in names.items() if full in self.plain.files}
        described = self.plain.describe(names.values())
        stored = {part: described[full] for part, full in names.items()}

        def weight_shape() -> list[int]:
            full = names["weight_shape"]
            return list(map(int, self.plain.read([full])[full]))

        try:
            return names, check_layer(format_name, stored, weight_shape)
        except ValueError as error:
            shapes = ", ".join(f"{part} {bracketed(each.shape)}" for part, each in stored.items())
            raise self._wrong(prefix, f"{error} ({shapes})") from error

    def _wrong(self, prefix: str, why: str) -> WeightsError:
        format_name = self.packed[prefix]
        return WeightsError(
            f"{self.path}: {shown(prefix)} is not a layer of {format_name}: {shown(why)}; download "
            "it again, or give a checkpoint in float"
        )


def with_integers(source: TensorSource, config: Config | None) -> TensorSource:
    """Return the checkpoint, as a `_QuantisedSource` if it has packed linear layers."""
    quantisation = config.values.get("quantization_config") if config else None
    quantisation = quantisation if isinstance(quantisation, dict) else {}
    method = str(quantisation.get("quant_method", "")).lower()
    marked = {name.rpartition(".")[0] for name in source.files if name.rpartition(".")[2] in MARKS}
    marks = {
        prefix: next(mark for mark in MARKS if f"{prefix}.{mark}" in source.files)
        for prefix in sorted(marked)
    }
    packed = {prefix: MARKS[mark] for prefix, mark in marks.items()}
    for prefix, format_name in packed.items():
        if format_name == GPTQ and _is_awq(source, prefix, method):
            packed[prefix] = AWQ
    _check_known(source.path, quantisation, method)
    names = _zero_biases(source, packed)
    for prefix, format_name in packed.items():
        names |= {f"{prefix}.{part}" for part in TENSORS[format_name]}
    files = {name: file for name, file in source.files.items() if name not in names}
    for prefix, mark in marks.items():
        files[f"{prefix}.weight"] = source.files[f"{prefix}.{mark}"]
    bits = quantisation.get("bits", quantisation.get("w_bit"))
    return _QuantisedSource(
        source.path, files, packed, source, bits if isinstance(bits, int) else None,
        quantisation.get("checkpoint_format") != "gptq_v2",
    )  # fmt: skip


def _is_awq(source: TensorSource, prefix: str, method: str) -> bool:
    """Return whether a `qweight` is in AWQ's format, by the config or by its shape."""
    if method in ("awq", "gptq"):
        return method == "awq"
    scales, qweight = f"{prefix}.scales", f"{prefix}.qweight"
    if scales not in source.files or not source.files[scales].is_file():
        return False
    stored = source.describe([scales, qweight])
    return stored[qweight].shape[-1:] != stored[scales].shape[-1:]


def _check_known(path: Path, quantisation: Mapping[str, Any], method: str) -> None:
    """Check that a `quantization_config` has only values that the readers support."""
    version = str(quantisation.get("version", "gemm")).lower()
    groups = quantisation.get("config_groups")
    activations = [
        group.get("input_activations")
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
    ]
    for name, value, known in (
        ("quant_method", method, ("", "gptq", "awq", "compressed-tensors", "bitsandbytes")),
        ("version", version, ("gemm",) if method == "awq" else (version,)),
        ("bits", quantisation.get("bits", 4), (4, 8)),
    ):
        if value not in known:
            raise WeightsError(
                f"{path}: quantization_config.{name} = {shown(repr(value))} is not supported "
                f"(known: {', '.join(str(item) for item in known if item)}); give a checkpoint in "
                "float"
            )
    if any(activations):
        raise WeightsError(
            f"{path}: quantization_config has input_activations, and activations stay in float "
            "here; give a checkpoint of which the weights alone are quantised"
        )


def _zero_biases(source: TensorSource, packed: Iterable[str]) -> set[str]:
    """Return the names of biases that are 0, which AutoGPTQ writes if the model has no biases."""
    candidates = [f"{prefix}.bias" for prefix in packed]
    # The files of other layers of a sharded model need not exist.
    names = [name for name in candidates if name in source.files and source.files[name].is_file()]
    return {name for name, tensor in source.read(names).items() if not tensor.any()}
