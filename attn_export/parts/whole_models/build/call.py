"""A decoder as transformers runs it, called with the inputs of a graph with caches in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attn_export.interface import BATCH, QUERIES
from attn_export.parts.whole_models.build.part import ids_beside, passing
from attn_export.parts.whole_models.export_layouts import End, Entry, Role
from attn_export.parts.whole_models.model_call import ModelCall, Rounding
from attn_export.runtimes.decode_inputs import HIDDEN, IDS, LOGIT_INDEX, PAST_LENGTH


class OwnCall(ModelCall):
    """A model as transformers runs it, with the inputs of a graph with caches in place.

    `rounds`: What rounds keys and values for the cache, if it has another type than the model.
    """

    def __init__(self, model: Any, entry: Entry, rounds: Rounding | None = None) -> None:
        self._crosses = any(end.of == "encoder" for end in entry.inputs.values())
        added: tuple[Role, ...] = ("lengths", *(() if self._crosses else ("positions",)))
        own = [End(role, role, "int64", ()) for role in added]
        own = [*own, End(IDS, "ids", "int64", (BATCH, QUERIES))]
        inputs = {**entry.inputs, **{end.name: end for end in own}}
        super().__init__(model, dataclasses.replace(entry, inputs=inputs))
        self.rounds = rounds
        if not self._crosses:
            count = self.config.get_text_config().num_hidden_layers
            self.others = set(range(count)) - {end.layer for end in entry.having("past")}

    def forward(self, **given: Tensor) -> list[Tensor]:
        """Return the outputs of the graph, in its order."""
        batch = len(next(iter(given.values())))
        if self._crosses and batch > 1:  # some take no positions: one by one they need none
            ones = [
                self(**{name: x[at : at + 1] for name, x in given.items()}) for at in range(batch)
            ]
            return [torch.cat(each) for each in zip(*ones, strict=True)]
        index = given.get(LOGIT_INDEX)
        hidden = given.get(HIDDEN)
        if hidden is not None:
            given[IDS] = ids_beside(hidden)
        past = next(x for name, x in given.items() if name.startswith("past_key_"))
        length = given.get(PAST_LENGTH, torch.full((len(past),), past.shape[2]))
        count = given[IDS].shape[1]
        given["lengths"] = length + count
        if not self._crosses:
            given["positions"] = length[:, None] + torch.arange(count)
        with passing(hidden) as passed:
            logits, *caches = super().forward(**given)
        logits = logits if passed.found is None else passed.found
        if index is not None:
            logits = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
        return [logits, *caches]
