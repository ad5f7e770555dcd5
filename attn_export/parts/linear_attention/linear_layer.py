"""`LinearAttention` in plain PyTorch: a state that each token changes, and its queries read.

Legend: B batch, H query heads, Hkv key/value heads, r = H / Hkv, L tokens, D width of a query or
key, Dv width of a value, C decays of a head: 1 or D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.attention import onnx_attention
from attn_export.attention.module import Attention
from attn_export.spec import AttentionSpec


class LinearAttention(Attention):
    """Linear attention with the gates of the gated delta rule (Yang et al. 2025, eq. 10).

    The decay of a token is `exp(-exp(A_log) * softplus(a_proj(x) + dt_bias))` and the rate with
    which it writes is `sigmoid(b_proj(x))`, as far as the update rule has them.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        Hkv, wide = spec.num_kv_heads, spec.decay == "channel"
        self.decays, self.deltas = "gated" in spec.update_rule, "delta" in spec.update_rule
        if self.decays:
            decays = Hkv * (spec.head_dim if wide else 1)
            self.a_proj: nn.Linear = nn.Linear(spec.embed_dim, decays, bias=False)
            self.A_log: nn.Parameter = nn.Parameter(torch.empty(Hkv, 1).uniform_(0.5, 4.0).log())
            # Decays between 0.1 and 0.98 if there is no input.
            self.dt_bias: nn.Parameter = nn.Parameter(torch.empty(decays).uniform_(-3.0, 0.0))
        if self.deltas:
            self.b_proj: nn.Linear = nn.Linear(
                spec.embed_dim, 1 if spec.shared_beta else Hkv, bias=False
            )
        if spec.conv_width:
            self.conv: nn.Parameter = nn.Parameter(torch.empty(_channels(spec), 1, spec.conv_width))
            nn.init.normal_(self.conv, std=spec.conv_width**-0.5)
        self.to(getattr(torch, spec.dtype))

    def forward(  # type: ignore[override]
        self, query: Tensor, past_state: Tensor | None = None, past_conv: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute linear attention with projections.

        `query`: `[B, L, E]`.
        `past_state`: `[B, Hkv, D, Dv]`, if the spec has a state.
        `past_conv`: The last tokens before the convolution, `[B, channels, conv_width - 1]`.

        Returns:
            `output [B, L, E]`; if the spec has a state, then `present_state` and `present_conv`,
            too.
        """
        self._check_inputs(past_state=past_state, past_conv=past_conv)
        spec = self.spec
        q, k, v = self.q_proj(query), self.k_proj(query), self.v_proj(query)
        present_conv: tuple[Tensor, ...] = ()
        if spec.conv_width:
            joined = torch.cat([q, k, v], -1).mT  # [B, channels, L]
            mixed, kept = _convolve(joined, self.conv, past_conv)
            present_conv = (kept,)
            mixed = (mixed / (1 + (-mixed).exp())).mT  # as a sigmoid it would lose digits
            q, k, v = mixed.split([x.shape[-1] for x in (q, k, v)], dim=-1)
        q = self.q_norm(q.unflatten(-1, (spec.num_heads, -1)))  # [B, L, H, D]
        k = self.k_norm(k.unflatten(-1, (spec.num_kv_heads, -1)))
        if self.deltas:  # else the state could grow with each token
            q, k = (x / (x.square().sum(-1, keepdim=True) + spec.norm_eps).sqrt() for x in (q, k))
        decay = beta = None
        if self.decays:
            steps = _softplus(self.a_proj(query) + self.dt_bias)
            rates = self.A_log.exp().expand(-1, steps.shape[-1] // spec.num_kv_heads).flatten()
            decay = -rates * steps  # [B, L, Hkv·C], the logarithm
        if self.deltas:
            # Not as a sigmoid, which ONNX Runtime gives to 1e-7 only.
            beta = 1 / (1 + (-self.b_proj(query)).exp())  # [B, L, Hkv or 1]
        heads = LinearHeads(spec.num_heads, spec.num_kv_heads, spec.update_rule, spec.softmax_scale)
        attended, state = attend(q.flatten(2), k.flatten(2), v, past_state, decay, beta, heads)
        output: Tensor = self.out_proj(attended)
        return (output, state, *present_conv) if spec.has_state else output


LAYERS = {"linear": LinearAttention}


def _channels(spec: AttentionSpec) -> int:
    """Return the number of channels of queries, keys and values together."""
    H, Hkv = spec.num_heads, spec.num_kv_heads
    return (H + Hkv) * spec.head_dim + Hkv * spec.v_head_dim


def _convolve(x: Tensor, weight: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a causal convolution of each channel `[B, C, L]`, and its last tokens `[B, C, k - 1]`.

    `weight`: `[C, 1, k]`. `past`: `[B, C, k - 1]`, or None for zeros.
    """
    (B, C, L), kept = x.shape, weight.shape[-1] - 1
    if onnx_attention.emitting():
        convolved, present = torch.onnx.ops.symbolic_multi_out(
            "CausalConvWithState", (x, weight, None, past), {}, dtypes=(x.dtype, x.dtype),
            shapes=((B, C, L), (B, C, kept)), version=onnx_attention.OPSET,
        )  # fmt: skip
        return convolved, present
    padded = torch.cat([x.new_zeros(B, C, kept) if past is None else past, x], dim=-1)
    return F.conv1d(padded, weight, groups=C), padded[..., L:]


class LinearHeads(NamedTuple):
    """Attributes of a `LinearAttention` node."""

    q_num_heads: int
    kv_num_heads: int
    update_rule: str
    scale: float


def attend(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor | None, decay: Tensor | None,
    beta: Tensor | None, heads: LinearHeads,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention `[B, L, H·Dv]` and the state, by one node while exporting.

    `q`: `[B, L, H·D]`. `k`: `[B, L, Hkv·D]`. `v`: `[B, L, Hkv·Dv]`. `past`: `[B, Hkv, D, Dv]`.
    `decay`: logarithms, `[B, L, Hkv·C]`. `beta`: `[B, L, Hkv or 1]`.
    """
    if not onnx_attention.emitting():
        return _recur(q, k, v, past, decay, beta, heads)
    (B, L, _), Hkv = q.shape, heads.kv_num_heads
    D, Dv = k.shape[-1] // Hkv, v.shape[-1] // Hkv
    attended, present = torch.onnx.ops.symbolic_multi_out(
        "LinearAttention",
        (q, k, v, past, decay, beta),
        heads._asdict(),
        dtypes=(q.dtype, q.dtype),
        shapes=((B, L, heads.q_num_heads * Dv), (B, Hkv, D, Dv)),
        version=onnx_attention.OPSET,  # which PyTorch can write; it is newer
    )
    return attended, present


def _recur(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor | None, decay: Tensor | None,
    beta: Tensor | None, heads: LinearHeads,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype, Hkv = q.dtype, heads.kv_num_heads
    D, Dv = k.shape[-1] // Hkv, v.shape[-1] // Hkv
    wide = torch.promote_types(dtype, torch.float32)
    q = q.to(wide).unflatten(-1, (Hkv, -1, D))  # [B, L, Hkv, r, D]
    k, v = (x.to(wide).unflatten(-1, (Hkv, -1)) for x in (k, v))
    state = q.new_zeros(len(q), Hkv, D, Dv) if past is None else past.to(wide)
    attended = []
    for t in range(q.shape[1]):
        new = v[:, t]  # [B, Hkv, Dv]
        if decay is not None:
            state = state * decay[:, t].to(wide).exp().unflatten(-1, (Hkv, -1)).unsqueeze(-1)
        if beta is not None:
            found = (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
            new = beta[:, t].to(wide).unsqueeze(-1) * (new - found)
        state = state + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        attended.append(q[:, t] @ state)  # [B, Hkv, r, Dv]
    joined = heads.scale * torch.stack(attended, dim=1).flatten(2)
    return joined.to(dtype), state.to(dtype)


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), as one node while exporting."""
    if not onnx_attention.emitting():
        return F.softplus(x)
    version = onnx_attention.OPSET
    return torch.onnx.ops.symbolic("Softplus", (x,), dtype=x.dtype, shape=x.shape, version=version)
