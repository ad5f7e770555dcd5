"""What rounding costs a quantised model, by cause, layer and projection."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_decoder
from torch import nn

from attn_export import Subject
from attn_export.quality import Loss

LAYERS = 3
FIELDS = {
    "llama": {"num_hidden_layers": LAYERS},
    "gpt2": {"num_hidden_layers": LAYERS, "n_layer": LAYERS},
}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def measured(request) -> Any:
    """Return an oracle of a model in int4, inputs of two cases, and what measures its losses."""
    model = tiny_decoder(request.param, **FIELDS[request.param])
    subject: Any = Subject.from_model(model, weights_dtype="int4", max_len=16)
    oracle = subject.own_oracle()
    inputs = [case.inputs for case in subject.plan().cases if case.sizes["past_len"] > 0][:2]
    with oracle._as_before():
        losses, _ = oracle.weight_losses(inputs)
        yield oracle, inputs, losses


def by_other_means(oracle: Any, model: nn.Module, names: list[str]) -> nn.Module:
    """Return a model with the rounded weights of some layers, the others as before."""
    changed = copy.deepcopy(model)
    for layer, _, weight, by_output in oracle._weights._places:
        path = next(p for p, x in oracle.subject.module.model.named_modules() if x is layer)
        if path in names:
            whole = torch.from_numpy(weight.dequantised())
            # Not in place: the embeddings may share it.
            value = (whole.T if by_output else whole).double()
            changed.get_submodule(path).weight = nn.Parameter(value)
    return changed


def test_a_layer_that_is_rounded_alone_gives_what_a_model_with_it_gives(measured):
    oracle, inputs, losses = measured
    groups = losses.groups()
    assert len(groups) == LAYERS + 1
    kind = oracle.subject.module.config.model_type
    plain: Any = tiny_decoder(kind, **FIELDS[kind]).double()
    for choice in (*groups.values(), list(losses.products)):
        outputs = losses.outputs([{path: losses.products[path] for path in choice}])[0]
        call = copy.deepcopy(oracle.subject.module)
        call.model = by_other_means(oracle, plain, choice)
        for given, found in zip(inputs, outputs, strict=True):
            tensors = {
                n: torch.tensor(x.astype(np.float64) if x.dtype == np.float32 else x)
                for n, x in given.items()
            }
            with torch.inference_mode():
                expected = dict(zip(oracle.subject.outputs, call(**tensors), strict=True))
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array.numpy(), rtol=1e-5, atol=1e-6)


def test_layers_are_not_run_before_the_one_that_is_rounded(measured):
    _, inputs, losses = measured
    counts: Counter[int] = Counter()
    handles = [
        next(iter(layer.children())).register_forward_hook(
            lambda *_, at=at: counts.update([at])
        )
        for at, layer in enumerate(next(
            x for x in losses._model.modules() if isinstance(x, nn.ModuleList) and len(x) == LAYERS
        ))
    ]  # fmt: skip
    layers, projections = losses.by_layer()
    for handle in handles:
        handle.remove()
    names = list(losses.groups())
    assert sorted(each.part for each in layers) == sorted(names)
    within = Counter(int(each.part.split(".")[2]) for each in projections)
    # A run of layer i alone runs it and those after it: all of them half of the model each.
    alone = {at: at + 1 for at in range(LAYERS)}
    more = {at: sum(within[before] for before in range(at + 1)) for at in range(LAYERS)}
    assert counts == {at: len(inputs) * (alone[at] + more[at]) for at in range(LAYERS)}
    assert [each.sqnr for each in layers] == sorted(each.sqnr for each in layers)
    # The dearest layer is one: what is rounded together costs more than each part.
    whole = losses.loss("", losses.outputs([losses.products])[0])
    assert whole.sqnr < layers[0].sqnr < layers[-1].sqnr


def test_the_power_of_a_loss_is_a_share_of_another():
    large, small = Loss("a", 20.0, 1.0), Loss("b", 40.0, 1.0)
    assert small.share_of(large) == pytest.approx(0.01)
    assert Loss("c", math.inf, 1.0).share_of(large) == 0
