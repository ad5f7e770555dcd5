"""Checkpoints of whole models, as transformers' `save_pretrained` writes them.

Nothing of a checkpoint is executed: keys of config.json that ask for code are refused, others that
the model's class does not read are left out, and only safetensors files are handed to transformers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from attn_export.errors import WeightsError, one_line
from attn_export.parts.whole_models.integer_checkpoint import (
    IntegerSource,
    integer_format,
    with_integers,
)
from attn_export.parts.whole_models.model_config import config_of
from attn_export.parts.whole_models.sentence_folder import SentenceFolder, read_sentence_folder
from attn_export.parts.whole_models.unit_weights import (
    LARGE,
    converted_in_files,
    copy_by_unit,
    hold_by_unit,
)
from attn_export.runtimes.child_main import allow_mapped
from attn_export.runtimes.protocol import Limits
from attn_export.temp_folders import scratch, use_disk
from attn_export.weights.source import CONFIG, Stored, TensorSource, listed, open_source

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

_LAYERS = re.compile(r"(num_|n_|num_hidden_|encoder_|decoder_|num_encoder_|num_decoder_)layers?")
"""The keys of numbers of layers."""

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
        sentence: What sentence-transformers adds to the model.
        left_out: Tensors of heads that the model lacks.
    """

    folder: Path
    config: PreTrainedConfig
    architecture: type[PreTrainedModel]
    source: TensorSource
    elements: int
    notes: tuple[str, ...] = ()
    sentence: SentenceFolder | None = None
    left_out: frozenset[str] = frozenset()

    @property
    def has_encoder(self) -> bool:
        """Whether the model is an encoder, or has one beside its decoder."""
        return self.config.is_encoder_decoder or not self.architecture.can_generate()

    @property
    def is_by_unit(self) -> bool:
        """Whether it is so large that weights are read as they are needed."""
        return self.elements > LARGE and not self.has_integers

    @property
    def has_integers(self) -> bool:
        """Whether it holds weights of integers."""
        return isinstance(self.source, IntegerSource)

    def load(self) -> PreTrainedModel:
        """Return the model in its type, for evaluation, with every tensor from the files.

        One with weights of integers is in float32, which holds what they stand for.
        """
        self._refuse_too_large()
        return self._whole(self._loaded())

    def _whole(self, model: Any) -> PreTrainedModel:
        """Return the model with what sentence-transformers adds to it."""
        whole: Any = model if self.sentence is None else self.sentence.wrapped(model)
        made: PreTrainedModel = whole
        return made

    def load_by_unit(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Return the model in a type, which holds weights only while the unit that has them runs.

        `dtype`: Default: that of the model.
        """
        use_disk()
        allow_mapped(sum(file.stat().st_size for file in {*self.source.files.values()}))
        with converted_in_files():
            model = self._loaded()
        hold_by_unit(model, {*self.source.files.values()})
        if dtype is None or dtype == model.dtype:
            return self._whole(model)
        import torch

        loading: Any = import_module("transformers.core_model_loading")
        own, state, plan = model.dtype, set(model.state_dict()), model._get_dtype_plan(dtype)
        kept = loading.build_glob_alternation([*plan])[0] if plan else None  # in float32

        def dtype_of(name: str, x: torch.Tensor) -> torch.dtype:
            if kept and kept.search(name):
                return torch.float32
            return dtype if x.dtype == own and name in state else x.dtype

        changed: Any = copy_by_unit(model, dtype_of)
        # What it computes itself is as exact as in a model that is made in the type.
        for name, buffer in self._without_weights(dtype).named_buffers():
            if name not in state:
                path, _, leaf = name.rpartition(".")
                changed.get_submodule(path)._buffers[leaf] = buffer
        changed.config.dtype = dtype
        return self._whole(changed)

    def _without_weights(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the model in a type, with its buffers, and without weights."""
        import torch
        from torch import nn

        register = nn.Module.register_parameter

        def on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
            weight = None if weight is None else nn.Parameter(weight.to("meta"), False)
            register(module, name, weight)

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        with mock.patch.object(nn.Module, "register_parameter", on_meta):
            try:
                return self.architecture(copy.deepcopy(self.config), **self._without_pooler)
            finally:
                torch.set_default_dtype(before)

    def _loaded(self) -> PreTrainedModel:
        # As Any: types of transformers lack the pair that `output_loading_info` gives.
        transformers: Any = import_module("transformers")
        architecture: Any = self.architecture
        integers = self.source if isinstance(self.source, IntegerSource) else None
        if integers:
            self.config.dtype = import_module("torch").float32
        given = {"state_dict": integers.read(integers.files)} if integers else {}
        try:
            with _quiet(), scratch() as folder:
                # Without what else lies in the folder: adapters, code, generation settings.
                for name, file in _linked(self.source).items():
                    (folder / name).symlink_to(file.absolute())
                result = architecture.from_pretrained(
                    None if given else folder, config=self.config, dtype=self.config.dtype,
                    local_files_only=True, attn_implementation="eager", output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    generation_config=transformers.GenerationConfig(),  # else it opens a file
                    use_safetensors=True, **given, **self._without_pooler,
                )  # fmt: skip
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
            raise WeightsError(
                f"transformers cannot load {self.folder}: {one_line(error)}"
            ) from error
        model, found = result
        if integers:
            unexpected = found["unexpected_keys"]
            found["unexpected_keys"] = {*unexpected} - integers.zero_biases(unexpected)
        found["unexpected_keys"] = {*found["unexpected_keys"]} - self.left_out
        self._refuse_others(found)
        if integers:
            integers.keep(model)
        model.set_experts_implementation("eager")  # the others have no float64
        model.eval()
        loaded: PreTrainedModel = model
        return loaded

    @property
    def _without_pooler(self) -> dict[str, bool]:
        """The argument for a model without the pooler that pooling of its own replaces."""
        return _without_pooler(self.architecture) if self.sentence else {}

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
    sentence = read_sentence_folder(folder)
    folder = sentence.transformer if sentence else folder
    source, of = open_source(folder), integer_format(folder / CONFIG)
    source = source if of is None else with_integers(source, of)
    notes: list[str] = []
    config, architecture = config_of(folder / CONFIG, notes, is_base=sentence is not None)
    stored = source.describe(source.files)
    elements = _bound(folder, config, architecture, stored)
    left_out = frozenset(_heads(config, architecture, stored)) if sentence else frozenset()
    if left_out:
        notes.append(f"heads that pooling does not read, left out: {listed(sorted(left_out))}")
    return _ModelCheckpoint(
        folder, config, architecture, source, elements, tuple(notes), sentence, left_out
    )


def _without_pooler(architecture: type[PreTrainedModel]) -> dict[str, bool]:
    taken = inspect.signature(architecture.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in taken else {}


def _heads(
    config: PreTrainedConfig, architecture: type[PreTrainedModel], stored: Iterable[str]
) -> Iterator[str]:
    """Yield the tensors of a checkpoint that are in no module of the model without a head."""
    import torch

    with torch.device("meta"):
        parts = {
            name
            for name, _ in architecture(config, **_without_pooler(architecture)).named_children()
        }
    prefix = f"{architecture.base_model_prefix}."
    for name in stored:
        first = name.removeprefix(prefix).partition(".")[0]
        # A head is beside the model, and a pooler is the last of its modules.
        if first not in parts and (first == "pooler" or not name.startswith(prefix)):
            yield name


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
