"""Models without caches: the sizes of images and sounds, their cases, and the axes of outputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attn_export.errors import AttnExportError, ExportError, UsageError, one_line
from attn_export.interface import BATCH, QUERIES, Input, Shape
from attn_export.parts.whole_models.build.attention import Call, attending
from attn_export.parts.whole_models.export_layouts import End
from attn_export.parts.whole_models.model_call import ModelCall
from attn_export.parts.whole_models.model_cases import CaseMaker, Situation
from attn_export.results import Arrays, Case

_SHORT = 4
"""The number of tokens of a batch element that is padded to 9."""


def main_input(config: Any, name: str, dtype: str) -> Input:
    """Return the description of the main input of a model; its sizes are those of the config."""
    if name == "input_ids":
        return Input((BATCH, QUERIES), "int64", 0, config.get_text_config().vocab_size - 1)
    if name == "pixel_values":
        config = getattr(config, "vision_config", config)  # of the images beside texts
    fields = vars(config)
    if name == "pixel_values" and {"image_size", "num_channels"} <= fields.keys():
        size, frames = config.image_size, fields.get("num_frames")  # of a video
        sizes = size if isinstance(size, list | tuple) else (size, size)
        return Input((BATCH, *([frames] if frames else []), config.num_channels, *sizes), dtype)
    if name == "input_values" and "conv_kernel" in fields:
        return Input((BATCH, QUERIES), dtype)
    if name == "input_values" and {"max_length", "num_mel_bins"} <= fields.keys():
        return Input((BATCH, config.max_length, config.num_mel_bins), dtype)
    if name == "input_features" and {"num_mel_bins", "max_source_positions"} <= fields.keys():
        return Input((BATCH, config.num_mel_bins, 2 * config.max_source_positions), dtype)
    raise ExportError(f"{config.model_type} takes {name}, whose sizes are not known")


def least_length(model: Any) -> int:
    """Return the least number of samples of which convolutions make two frames, or else 1."""
    sizes = (getattr(model.config, f"conv_{name}", ()) for name in ("kernel", "stride"))
    steps = [*zip(*sizes, strict=False)]
    least = 2 if steps else 1
    for kernel, stride in reversed(steps):
        least = (least - 1) * stride + kernel
    return least


def named_shapes(
    call: ModelCall, shapes: Sequence[tuple[int, ...]], maker: CaseMaker, shown: Situation
) -> dict[str, Shape]:
    """Return the axes of the outputs of a model without caches, by a run of other sizes.

    `shapes`: Those in the situation `shown`.
    """
    count, length = len(shown.new) + 1, 2 * max(shown.new) + 1
    other = dataclasses.replace(shown, new=(length,) * count, past=(0,) * count)
    inputs = {n: torch.from_numpy(a) for n, a in maker.inputs(other, "example").items()}
    before, after = maker.sizes(shown), maker.sizes(other)
    named = {(before[axis], after[axis]): axis for axis in (QUERIES, BATCH)}

    def axis_of(size: int, larger: int) -> int | str:
        return size if size == larger else named.get((size, larger), "")

    others = output_shapes(call, inputs)
    return {
        name: tuple(itertools.starmap(axis_of, zip(one, two, strict=True)))
        for name, one, two in zip(call.entry.outputs, shapes, others, strict=True)
    }


def output_shapes(
    call: ModelCall, inputs: Mapping[str, torch.Tensor], given: str = ""
) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs of a run.

    `given`: What the inputs are, if they are the user's own.
    """
    try:
        with torch.no_grad():
            return [tuple(tensor.shape) for tensor in call(**inputs)]
    except AttnExportError:
        raise
    except Exception as error:  # as various as the models
        name = call.entry.path.name
        if given:
            text = f"--inputs {given}: the model refuses them: {one_line(error)}"
            raise UsageError(text) from error
        raise ExportError(f"{name}: the model cannot run: {one_line(error)}") from error


def hides_tokens(call: ModelCall, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a layer hides tokens that are no padding, as a window does."""
    seen = Call(None)
    try:
        with torch.inference_mode(), attending(call.model, seen):
            call(**inputs)
    except Exception:  # of attention that is the model's own
        return False
    return seen.hides


class EncoderCases(CaseMaker):
    """Makes inputs of a graph without caches; rows of padded tokens alone are not judged."""

    hides = False
    """Whether a token that is padding may see nothing; what models make of that differs."""

    read_at: Mapping[int, frozenset[str]] = {0: frozenset(), -1: frozenset()}
    """The outputs that are read at the first or the last token, be it padding."""

    pad: int | None = None
    """The token that padding must have, since the model finds its last token by it."""

    def find_read_padding(self, call: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Find the outputs that change with the first or the last token alone, hidden padding.

        If padding that has the model's own token changes none, cases pad with that.
        """
        self.read_at = {at: self._read_at(call, at) for at in (0, -1)}
        config: Any = getattr(call, "config", None)
        pad = getattr(config, "pad_token_id", None)
        if self.read_at[-1] and isinstance(pad, int):
            self.pad = pad
            if self._reads_pads(call):
                self.pad = None
            else:
                self.read_at = {**self.read_at, -1: frozenset()}

    def _read_at(self, call: Callable[..., Sequence[torch.Tensor]], at: int) -> frozenset[str]:
        ids = self.entry.one("ids")
        if ids is None or not self.hides or (at == 0 and not self.pads_left):
            return frozenset()
        inputs = self._padded(at)
        changed = inputs[ids.name].clone()
        changed[1, at] = (changed[1, at] + 1) % self.limits.vocabulary
        try:
            with torch.inference_mode():
                one, two = call(**inputs), call(**{**inputs, ids.name: changed})
        except Exception:  # so many tokens are too many
            return frozenset()
        differ = (not torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True))
        changed_ones = itertools.compress(self.entry.outputs, differ)
        return frozenset(name for name in changed_ones if len(self.axes[name]) == 2)

    def _reads_pads(self, call: Callable[..., Sequence[torch.Tensor]]) -> bool:
        """Return whether padding on the right, of the model's own token, changes an output."""
        inputs = self._padded(-1)
        alone = {name: x[1:, :_SHORT] for name, x in inputs.items()}
        try:
            with torch.inference_mode():
                pairs = zip(call(**inputs), call(**alone), self.entry.outputs, strict=True)
        except Exception:  # so few tokens are too few
            return True
        return any(
            not torch.allclose(one[1:], other, rtol=1e-3, atol=1e-5)
            for one, other, name in pairs
            if name in self.read_at[-1]
        )

    def _padded(self, at: int) -> dict[str, torch.Tensor]:
        """Return inputs of a batch of which the second element is padded at its begin or end."""
        side = "right" if at else "left"
        situation = Situation("of_last", "", (9, _SHORT), (0, 0), side)
        return {n: torch.from_numpy(a) for n, a in self.inputs(situation, "of_last").items()}

    def inputs(self, situation: Situation, seed: str) -> dict[str, np.ndarray]:
        """Return the inputs of the graph, in its order."""
        inputs, ids = super().inputs(situation, seed), self.entry.one("ids")
        if self.pad is not None and ids is not None:
            inputs[ids.name] = np.where(situation.valid(), inputs[ids.name], self.pad)
        return inputs

    def _case(self, situation: Situation, inputs: Arrays, valid: np.ndarray) -> Case:
        if not self.entry.one("ids"):
            valid = np.ones_like(valid)
        case = super()._case(situation, inputs, valid)
        every, judged = {*range(len(valid))}, case.judged_rows
        others = every - {*case.ignored_rows}
        crossed = [n for n in judged if self.axes[n] == (BATCH, BATCH)]
        if all(others | {*judged[name]} == every for name in crossed):
            return case
        # Each image is judged beside a text that is not compared.
        rows = {n: () if n in crossed else tuple(sorted(others | {*judged[n]})) for n in judged}
        return dataclasses.replace(case, ignored_rows=tuple(sorted(every)), judged_rows=rows)

    def _judged(self, end: End, situation: Situation, valid: np.ndarray) -> tuple[int, ...]:
        at = [at for at, names in self.read_at.items() if end.name in names]
        if self.hides and len(self.axes[end.name]) == 2 and not valid[:, at].all():
            return ()  # it may be that of a token that sees nothing
        return super()._judged(end, situation, valid)
