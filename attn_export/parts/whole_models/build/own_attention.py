"""Attention that types of models compute themselves, by our function: relative biases added.

Legend: B batch, L tokens, E width, H heads, D head width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.parts.whole_models.build.attention import attend

_Forward = Callable[..., tuple[Tensor | None, ...]]


def _mpnet(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the attention of MPNet, whose bias is that of T5."""
    heads = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    query, key, value = (
        project(hidden_states).view(heads).transpose(1, 2)
        for project in (module.q, module.k, module.v)
    )
    attended = attend(module, query, key, value, attention_mask, position_bias=position_bias)[0]
    return (module.o(attended.flatten(2)),)


def _deberta(
    module: Any, hidden_states: Tensor, attention_mask: Tensor, _output_attentions: bool = False,
    query_states: Tensor | None = None, relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the attention of DeBERTa, whose biases depend on contents and distances."""
    heads = module.num_attention_heads
    asking = hidden_states if query_states is None else query_states
    query, key, value = (
        module.transpose_for_scores(project(states), heads)  # [B * H, L, D]
        for project, states in (
            (module.query_proj, asking), (module.key_proj, hidden_states),
            (module.value_proj, hidden_states),
        )
    )  # fmt: skip
    parts = 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
    bias = None
    if module.relative_attention:
        bias = module.disentangled_attention_bias(query, key, relative_pos, rel_embeddings, parts)
        bias = bias.unflatten(0, (-1, heads))
    # A number: tokens of padding, which see nothing, have the mean of all values there.
    least = torch.finfo(query.dtype).min
    mask = torch.zeros_like(attention_mask, dtype=query.dtype)
    mask = mask.masked_fill(~attention_mask.bool(), least)
    query, key, value = (x.unflatten(0, (-1, heads)) for x in (query, key, value))
    attended = attend(
        module, query, key, value, mask,
        scaling=(parts * query.shape[-1]) ** -0.5, position_bias=bias,
    )[0]  # fmt: skip
    return attended.flatten(2), None


_OWN: Mapping[str, _Forward] = {
    "transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention": _deberta,
    "transformers.models.mpnet.modeling_mpnet.MPNetSelfAttention": _mpnet,
}
"""Forwards by the class that they are of."""


@contextlib.contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Let attention that is a model's own call our function inside this block."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            kind = type(module)
            forward = _OWN.get(f"{kind.__module__}.{kind.__qualname__}")
            if forward is not None:
                module.forward = functools.partial(forward, module)
                stack.callback(vars(module).pop, "forward")
        yield
