"""Some successive layers of a decoder; the others pass on what they get.

What the first layer takes may be given, and what follows the last layer is dead code.

Legend: B batch, L new tokens, E width of hidden states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, UsageError, printable


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """The layers of a decoder from `first` to `last`, of `count`.

    Attributes:
        width: The size E of hidden states.
    """

    first: int
    last: int
    count: int
    width: int

    @property
    def begins(self) -> bool:
        """Whether it has the first layer, and takes the ids of tokens."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether it has the last layer, and gives logits."""
        return self.last == self.count - 1


@dataclasses.dataclass
class _Passed:
    """Hidden states of a run, `[B, L, E]`.

    Attributes:
        given: Those that the first layer of the part takes, if it is not the first of all.
        found: Those that the last layer gives, if it is not the last of all.
    """

    given: Tensor | None
    found: Tensor | None = None


_PASSED: ContextVar[_Passed] = ContextVar("attn_export_model_part")


@contextlib.contextmanager
def passing(given: Tensor | None) -> Iterator[_Passed]:
    """Give a part hidden states in this block, and get those that it gives."""
    token = _PASSED.set(_Passed(given))
    try:
        yield _PASSED.get()
    finally:
        _PASSED.reset(token)


def ids_beside(hidden: Tensor, token: int = 0) -> Tensor:
    """Return ids `[B, L]` for a model that does not read them, as hidden states are given."""
    return torch.full_like(hidden[..., 0], token, dtype=torch.int64)


class _OtherLayer(nn.Module):
    """A layer that is not in the part, before or after it."""

    def __init__(self, layer: nn.Module, *, is_before: bool, gives_tuple: bool) -> None:
        super().__init__()
        own = {n: x for n, x in vars(layer).items() if not n.startswith("_") and n != "training"}
        vars(self).update(own)  # models ask layers for their kind
        self._is_before, self._gives_tuple = is_before, gives_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the hidden states that were given, or note them as those that the part gives."""
        passed = _PASSED.get()
        if self._is_before:
            hidden_states = hidden_states if passed.given is None else passed.given
        elif passed.found is None:
            passed.found = hidden_states
        return (hidden_states,) if self._gives_tuple else hidden_states


def cut_model(model: Any, layers: str, count: int) -> ModelPart:
    """Leave only some layers in a decoder, and return which.

    `layers`: ``"0-3"``, the first and the last one.
    `count`: The number of its layers.
    """
    found = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", layers)
    first, last = map(int, found.groups()) if found else (1, 0)
    if not first <= last < count:
        raise UsageError(
            f"layers {printable(layers, 40)}: give A-B, the first and the last of the layers 0 to "
            f"{count - 1}"
        )
    stacks = (x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == count)
    stack = next(stacks, None)
    if stack is None:
        raise ExportError(f"{model.config.model_type} has no list of {count} layers to take from")
    seen: list[Any] = []
    hook = stack[0].register_forward_hook(lambda *given: seen.append(given[-1]))
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    hook.remove()
    gives_tuple = isinstance(seen[0], tuple)
    hidden = seen[0][0] if gives_tuple else seen[0]
    for number, layer in enumerate(stack):
        if not first <= number <= last:
            before = number < first
            stack[number] = _OtherLayer(layer, is_before=before, gives_tuple=gives_tuple)
    if last < count - 1:
        model.set_output_embeddings(nn.Identity())
    return ModelPart(first, last, count, hidden.shape[-1])
