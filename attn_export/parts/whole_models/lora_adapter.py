"""LoRA adapters in the layout of peft, merged into a model: W + scale · B · A.

Legend: R the rank, A `[R, in]`, B `[out, R]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.errors import UsageError, WeightsError, counted, printable
from attn_export.explain.search import Number
from attn_export.parts.whole_models.faults.changed_models import Edit, ModelFault, by_place
from attn_export.parts.whole_models.loaded_model import ADAPTER
from attn_export.untrusted_files import shortened
from attn_export.weights.source import listed, open_source, read_json, shown

_WEIGHTS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"

_PREFIX = "base_model.model."
"""What peft puts before the paths of the model."""

_LORA = re.compile(r"(?P<at>.+)\.lora_(?P<of>embedding_)?(?P<part>[AB])(?P<weight>\.weight)?")

_UNSUPPORTED = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "megatron_config",
    "trainable_token_indices", "target_parameters", "lora_bias", "alora_invocation_tokens",
    "arrow_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Fields of the config that change what the weights mean."""

_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the weights of the base model as they are."""

_PATTERN = re.compile(r"(\w|[.^$|-]|\\[.dw]|[*+](?![*+?])){1,200}")
"""Regular expressions of paths that end in reasonable time, if few of their parts repeat."""

_MOST_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class _Delta:
    """What an adapter adds to a weight.

    Attributes:
        path: That of the module.
        alpha: The number that, divided by the rank or its root, is the scale.
        is_turned: Whether the weight is stored as `[in, out]`.
    """

    path: str
    a: Tensor
    b: Tensor
    alpha: float
    is_root: bool
    is_turned: bool

    @property
    def rank(self) -> int:
        """The rank."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """The factor on B · A."""
        return self.alpha / (math.sqrt(self.rank) if self.is_root else self.rank)

    def times(self, factor: float) -> Tensor:
        """Return the product B · A in float64 times a number, as the weight is stored."""
        product: Tensor = factor * (self.b.double() @ self.a.double())
        return product.T if self.is_turned else product


@dataclasses.dataclass(frozen=True)
class LoraAdapter:
    """An adapter.

    Attributes:
        tensors: Parameters of the model that it replaces: biases, and modules that it saves.
        alpha: The number for modules without one of their own, and their rank.
    """

    folder: Path
    deltas: tuple[_Delta, ...]
    tensors: Mapping[str, Tensor]
    alpha: float
    rank: int

    def merge_into(self, model: nn.Module) -> None:
        """Add the adapter to the weights of a model, which remembers it."""
        before = {}
        for path, tensor in self.tensors.items():
            old = model.get_parameter(path)
            before[path] = old.detach().clone()
            old.data = tensor.to(old.dtype)
        for delta in self.deltas:
            weight: Any = model.get_submodule(delta.path).weight
            weight.data = (weight.double() + delta.times(delta.scale)).to(weight.dtype)
        merged: Any = model
        merged.lora_adapter = _Merged(self, before)

    def note(self) -> str:
        """Return what was merged."""
        saved = f" and {counted(len(self.tensors), 'tensor')} of its own" if self.tensors else ""
        return (
            f"the adapter {printable(self.folder, 120)} is merged: "
            f"{counted(len(self.deltas), 'product')} B · A{saved}"
        )


@dataclasses.dataclass(frozen=True)
class _Merged:
    """An adapter that a model has, and the parameters that it replaced."""

    adapter: LoraAdapter
    before: Mapping[str, Tensor]


# -- reading ------------------------------------------------------------------------------------


def merge_adapter(folder: Path | str, model: Any, *loaded: nn.Module) -> str:
    """Merge an adapter into models in memory, and return a note on it.

    `model`: The folder of their checkpoint.
    """
    if not isinstance(model, str | Path):
        raise UsageError("an adapter is for the folder of a checkpoint; merge it into the model")
    adapter = read_adapter(Path(folder), loaded[0])
    for each in {id(one): one for one in loaded}.values():
        adapter.merge_into(each)
    return adapter.note()


def read_adapter(folder: Path, model: nn.Module) -> LoraAdapter:
    """Read an adapter of a model; refuse what is none, is of another kind, or does not fit."""
    config = read_json(folder / ADAPTER, "the config of the adapter")
    _refuse_kinds(folder / ADAPTER, config)
    if not (folder / _WEIGHTS).is_file() and (folder / _PICKLE).is_file():
        raise WeightsError(
            f"{folder / _PICKLE} is a pickle, and reading it could run code; save the adapter with "
            "safe_serialization=True"
        )
    source = open_source(folder / _WEIGHTS)
    stored = source.describe(source.files)
    tensors, modules = source.read(stored), dict(model.named_modules())
    factors: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise WeightsError(f"{source.path}: {shown(name)} holds no finite floating numbers")
        path, found = name.removeprefix(_PREFIX), _LORA.fullmatch(name.removeprefix(_PREFIX))
        if found and bool(found["of"]) != bool(found["weight"]):
            factors.setdefault(found["at"], {})[found["part"]] = tensor
            continue
        path = path.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        replaced[path] = tensor
    _refuse_others(source.path, config, replaced, model)
    deltas = tuple(
        _delta(source.path, config, path, pair, modules.get(path)) for path, pair in factors.items()
    )
    if not deltas:
        raise WeightsError(f"{source.path} has no tensors lora_A and lora_B of {_PREFIX}…")
    _refuse_tied(source.path, model, [f"{delta.path}.weight" for delta in deltas] + [*replaced])
    _refuse_absent(folder / ADAPTER, config, modules, [*factors, *replaced])
    return LoraAdapter(
        folder, deltas, replaced, _number(folder / ADAPTER, config, "lora_alpha"),
        int(_number(folder / ADAPTER, config, "r")),
    )  # fmt: skip


def _refuse_kinds(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise WeightsError(
            f"{path}: peft_type {shortened(kind)} is not supported, LORA is; merge the adapter "
            "as peft's merge_and_unload does"
        )
    for field in _UNSUPPORTED:
        if config.get(field):
            raise WeightsError(
                f"{path}: {field} is not supported; merge the adapter as peft's merge_and_unload "
                "does"
            )
    initial = config.get("init_lora_weights", True)
    if not any(initial is each or (isinstance(each, str) and initial == each) for each in _INITIAL):
        raise WeightsError(
            f"{path}: init_lora_weights {shortened(initial)} changes the weights of the base; save "
            "the adapter converted to LoRA, as peft's path_initial_model_for_weight_conversion does"
        )
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise WeightsError(
            f"{path}: bias is none, all or lora_only; got {shortened(config['bias'])}"
        )


def _delta(
    file: Path, config: Mapping[str, Any], path: str, pair: Mapping[str, Tensor],
    module: nn.Module | None,
) -> _Delta:  # fmt: skip
    """Return what is added to the weight of a module, whose shapes must fit."""
    if set(pair) != {"A", "B"}:
        raise WeightsError(f"{file} has only lora_{next(iter(pair))} of {shown(path)}")
    if module is None:
        raise WeightsError(
            f"{file} is for {shown(path)}, which the model lacks; give the adapter of this model"
        )
    name = type(module).__name__
    if not isinstance(module, nn.Linear | nn.Embedding) and name != "Conv1D":
        raise WeightsError(
            f"{file}: {shown(path)} is {name}; linear layers and embeddings are read"
        )
    weight: Any = module.weight
    a, b, is_turned = pair["A"], pair["B"], not isinstance(module, nn.Linear)
    out, into = weight.shape[::-1] if is_turned else weight.shape
    rank = int(_of_module(file.with_name(ADAPTER), config, "rank_pattern", "r", path))
    if tuple(a.shape) != (rank, into) or tuple(b.shape) != (out, rank):
        raise WeightsError(
            f"{file}: lora_A and lora_B of {shown(path)} are {list(a.shape)} and {list(b.shape)}; "
            f"the model and rank {rank} need {[rank, into]} and {[out, rank]}"
        )
    alpha = _of_module(file.with_name(ADAPTER), config, "alpha_pattern", "lora_alpha", path)
    return _Delta(path, a, b, alpha, bool(config.get("use_rslora")), is_turned)


def _of_module(path: Path, config: Mapping[str, Any], by: str, usual: str, module: str) -> float:
    """Return a number of a module: by the first pattern that its path ends with, or the usual one.

    The rule is that of peft's `get_pattern_key`.
    """
    patterns = config.get(by) or {}
    if not isinstance(patterns, dict):
        raise WeightsError(f"{path}: {by} must be an object; got {shortened(patterns)}")
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern) or len(re.findall(r"[*+]", pattern)) > _MOST_REPEATS:
            raise WeightsError(
                f"{path}: {by} has the pattern {shortened(pattern)}; give plain paths"
            )
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise WeightsError(f"{path}: {by}: {shortened(pattern)}: {error}") from error
        if matches:
            return _number(path, patterns, pattern)
    return _number(path, config, usual)


def _number(path: Path, values: Mapping[str, Any], name: str) -> float:
    value = values.get(name, 8)  # peft's default of both
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < abs(value) < 2**31:
        raise WeightsError(f"{path}: {shown(name)} must be a number; got {shortened(value)}")
    return float(value)


def _refuse_others(
    file: Path, config: Mapping[str, Any], replaced: Mapping[str, Tensor], model: nn.Module
) -> None:
    """Refuse tensors that the model does not have, or that the config does not announce."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = config.get("modules_to_save") or []
    saved = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    has_bias = config.get("bias", "none") != "none"
    for path, tensor in replaced.items():
        old = parameters.get(path)
        module, _, name = path.rpartition(".")
        is_saved = any(f".{module}.".find(f".{each}.") >= 0 for each in saved)
        if old is None or not (is_saved or (has_bias and name == "bias")):
            raise WeightsError(
                f"{file} has {shown(path)}, which is no lora_A or lora_B, and none of the model's "
                "biases or modules_to_save"
            )
        if old.shape != tensor.shape:
            raise WeightsError(
                f"{file}: {shown(path)} is {list(tensor.shape)}; the model has {list(old.shape)}"
            )


def _refuse_tied(file: Path, model: nn.Module, paths: list[str]) -> None:
    """Refuse weights that several modules share: what merging means there differs."""
    places: dict[int, list[str]] = {}
    for path, value in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(value), []).append(path)
    for shared in places.values():
        if len(shared) > 1 and not set(shared).isdisjoint(paths):
            raise WeightsError(
                f"{file} changes {listed(shared)}, which are one weight; save the base with "
                "tie_word_embeddings false, or merge the adapter before"
            )


def _refuse_absent(
    path: Path, config: Mapping[str, Any], modules: Mapping[str, nn.Module], having: list[str]
) -> None:
    """Refuse an adapter without tensors of modules that its config names and the model has."""
    names = config.get("target_modules") or []
    for name in names if isinstance(names, list) else []:
        named = [at for at in modules if f".{at}".endswith(f".{name}")]
        if named and not any(f".{at}.".find(f".{name}.") >= 0 for at in having):
            raise WeightsError(
                f"{path}: target_modules has {shortened(name)}, of which {_WEIGHTS} has no tensor"
            )


@contextlib.contextmanager
def unmerged_products(model: nn.Module) -> Iterator[None]:
    """Let modules with an adapter compute W · x and B · A · x, too, as an unmerged graph does."""
    merged: _Merged | None = getattr(model, "lora_adapter", None)

    def also(delta: _Delta) -> Callable[..., None]:
        def compute(module: Any, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            x = inputs[0]
            base = module.weight - delta.times(delta.scale).to(module.weight)
            product = x @ (base if delta.is_turned else base.T)
            added = x @ delta.a.to(x).T @ delta.b.to(x).T
            for bias in () if module.bias is None else (module.bias,):
                product = product + bias
            product.add(added * delta.scale)

        return compute

    with contextlib.ExitStack() as stack:
        for delta in merged.adapter.deltas if merged else ():
            module = model.get_submodule(delta.path)
            if not isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(also(delta)).remove)
        yield


# -- faults -----------------------------------------------------------------------------------


def other_adapters(model: nn.Module) -> Iterator[ModelFault]:
    """Yield models in which the adapter is missing, or has another scale."""
    merged: _Merged | None = getattr(model, "lora_adapter", None)
    if merged is None:
        return
    adapter = merged.adapter
    yield from by_place(
        "adapter", "the adapter is missing in {}", [*_edits(model, merged, _scaled(lambda _: 0.0))]
    )
    is_root = adapter.deltas[0].is_root
    said, other = ("sqrt(r)", "r") if is_root else ("r", "sqrt(r)")
    for sentence, scale in (
        ("B · A is added in {} without alpha / " + said, lambda _: 1.0),
        (f"the adapter is scaled in {{}} by alpha / {other} where use_rslora is {is_root}",
         lambda d: d.alpha / (d.rank if d.is_root else math.sqrt(d.rank))),
        ("the adapter is scaled in {} by alpha, not by alpha / " + said, lambda d: d.alpha),
        ("the adapter is scaled in {} by 1 / " + said + ", not by alpha / " + said,
         lambda d: d.scale / d.alpha),
        ("the adapter is merged twice in {}", lambda d: 2 * d.scale),
        ("the adapter is subtracted in {}", lambda d: -d.scale),
        ("rank_pattern and alpha_pattern are ignored in {}",
         lambda d: adapter.alpha / (math.sqrt(adapter.rank) if d.is_root else adapter.rank)),
    ):  # fmt: skip
        edits = [*_edits(model, merged, _scaled(scale), products_only=True)]
        yield from by_place("adapter scale", sentence, edits)
    if len({delta.scale for delta in adapter.deltas}) == 1 and adapter.deltas[0].scale > 0:
        yield _numbered(model, merged, f"alpha / {said}", _NEAR * adapter.deltas[0].scale)
    for dtype in (torch.bfloat16, torch.float16):
        for rounds_product in (False, True):
            # peft merges in the type of the base, whatever the graph is exported in afterwards.
            rounded = _rounded(dtype, rounds_product)
            edits = [*_edits(model, merged, rounded, products_only=True)]
            name = str(dtype).removeprefix("torch.")
            yield from by_place("adapter type", f"the adapter is merged in {name} in {{}}", edits)


_NEAR = 1.05
"""The factor from the right scale to one from which a wrong scale is sought."""


def _numbered(model: nn.Module, merged: _Merged, what: str, number: float) -> ModelFault:
    """Return a model with an adapter of another scale."""
    right = merged.adapter.deltas[0].scale
    edits = tuple(_edits(model, merged, _scaled(lambda _: number), products_only=True))
    sentence = f"the adapter is scaled by {number:.6g} where {what} is {right:.6g}"
    other = functools.partial(_numbered, model, merged, what)
    wrong = Number(right, number, other)
    return ModelFault("adapter scale", sentence, edits, number=wrong)


_Change = Callable[[_Delta, Tensor], Tensor]
"""A function of what an adapter adds, and of the merged weight in float64, with a wrong one."""


def _scaled(scale: Callable[[_Delta], float]) -> _Change:
    return lambda delta, weight: weight + delta.times(scale(delta) - delta.scale)


def _rounded(dtype: torch.dtype, rounds_product: bool) -> _Change:
    def merge(delta: _Delta, weight: Tensor) -> Tensor:
        product = delta.times(delta.scale)
        base = (weight - product).to(dtype).double()
        added = product.to(dtype).double() if rounds_product else product
        return (base + added).to(dtype)

    return merge


def _edits(
    model: nn.Module, merged: _Merged, changed: _Change, *, products_only: bool = False
) -> Iterator[Edit]:
    """Yield the weights of the model with the adapter merged otherwise, where that differs."""
    for delta in merged.adapter.deltas:
        module: Any = model.get_submodule(delta.path)
        value = changed(delta, module.weight.detach().double()).to(module.weight.dtype)
        if not torch.equal(value, module.weight):
            yield Edit(
                f"{delta.path}.weight", module, "weight", nn.Parameter(value, requires_grad=False)
            )
    for path, old in () if products_only else merged.before.items():
        place, _, name = path.rpartition(".")
        module = model.get_submodule(place)
        value = old.to(getattr(module, name).dtype)
        yield Edit(path, module, name, nn.Parameter(value, requires_grad=False))
