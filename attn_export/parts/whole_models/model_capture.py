"""A model of transformers with our attention, and a decoder as one module with caches in place.

By transformers' extension points attention goes to a function that emits one `Attention` node for
each layer, masks are functions of positions that transformers gives, and caches are written from
`past_length` on.

Legend: B batch, L new tokens, S capacity of the caches, H query heads, Hkv key/value heads, D head
width, Dv value head width, K positions whose logits are wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attn_export.attention import functional, onnx_attention
from attn_export.errors import ExportError, one_line
from attn_export.parts.whole_models.single_nodes import SingleNodes

_NAME = "attn_export"
"""The name of our attention and masks in transformers."""

_EXPERTS = "batched_mm"
"""The form of a mixture of experts without branches on values, which cannot be exported."""

_MANY = 2**17
"""A number of keys at which layers that scale by it have another factor."""


@dataclasses.dataclass
class Call:
    """One run of a model.

    Attributes:
        past_length: The number of keys in the caches of each batch element, int64 `[B]`; None if
            there are no caches.
        encoded: The tokens of the encoder that are no padding, bool or int64 `[B, T]`, in a decoder
            that sees them.
        written: The keys in the caches, with those of the new tokens.
        causal: The masks that are causal and hide no more.
        attended: The modules that called our attention, in their order.
        hides: Whether a layer hides tokens that are no padding.
        padding: The masks of padding that the model made.
        cut: How often the hidden states were reduced to the positions whose logits are wanted.
        seen: What the cache says that it holds, if models ask beyond masks and positions.
    """

    past_length: Tensor | None
    encoded: Tensor | None = None
    written: list[Tensor] = dataclasses.field(default_factory=list)
    causal: list[Tensor] = dataclasses.field(default_factory=list)
    attended: list[nn.Module] = dataclasses.field(default_factory=list)
    hides: bool = False
    padding: list[Tensor] = dataclasses.field(default_factory=list)
    cut: int = 0
    seen: int | Tensor = 0


_CALL: ContextVar[Call] = ContextVar("attn_export_whole_model")


@contextlib.contextmanager
def attending(model: PreTrainedModel, call: Call) -> Iterator[None]:
    """Let a model call our attention inside this block, and experts that can be exported."""
    fields = {"_attn_implementation": _NAME, "_experts_implementation": _EXPERTS}
    parts = (vars(part).get("config") for part in model.modules())
    configs = {id(config): config for config in parts if hasattr(config, next(iter(fields)))}
    with contextlib.ExitStack() as stack:
        stack.callback(_CALL.reset, _CALL.set(call))
        for config in configs.values():
            for name, value in fields.items():
                stack.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        yield


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None, **_: Any,
) -> Tensor | None:  # fmt: skip
    """Return transformers' mask of a layer, bool `[B, 1, L, S]`, for pasts of unequal lengths."""
    call, length = _CALL.get(), _CALL.get().past_length
    is_full = mask_function == bidirectional_mask_function
    if call.encoded is not None and is_full and attention_mask is not None:
        length = None  # of the encoder's tokens
    if length is None and is_full:
        if attention_mask is None:
            return None
        return attention_mask[:, None, None].expand(batch_size, 1, q_length, kv_length)
    new = torch.arange(q_length)[None] if length is None else functional.positions(length, q_length)
    shown: Tensor = mask_function(
        torch.arange(batch_size)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        new[:, None, :, None],
        torch.arange(kv_length)[None, None, None],
    ).expand(batch_size, 1, q_length, kv_length)
    if mask_function == causal_mask_function:
        call.causal.append(shown)
    call.hides = True
    if length is None and attention_mask is not None:
        return shown & attention_mask[:, None, None]
    if attention_mask is not None:  # some models make one, in which nothing is padding
        call.padding.append(attention_mask)
    return shown


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of a layer, `[B, L, H, Dv]`.

    `key`: `[B, Hkv, S, D]`, such as the written cache.
    `value`: `[B, Hkv, S, Dv]`.
    `attention_mask`: Bool, or added to the scores; None if the layer shows all keys.
    `s_aux`: The sink of each head, `[H]`.
    `position_bias`: Added to the scores, `[B or 1, H, L, S]`.
    """
    call = _CALL.get()
    call.attended.append(module)
    length = call.past_length if any(key is written for written in call.written) else None
    causal = any(attention_mask is mask for mask in call.causal) and position_bias is None
    mask = functional.clamp_mask(attention_mask)
    if position_bias is not None:
        mask = functional.add_bias(mask, position_bias)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options: Any = {"scale": scale, "softcap": softcap}
    if onnx_attention.emitting() and s_aux is None:
        attended = onnx_attention.attention_node(
            query, key, value, None if causal else mask, past_length=length, causal=causal,
            **options,
        )[0]  # fmt: skip
    else:
        if length is not None:
            written = functional.visible_keys(length, query.shape[2], key.shape[2], causal=False)
            mask = functional.restrict(mask, written)
        if s_aux is not None and onnx_attention.emitting():
            attend: Any = onnx_attention.sink_attention_nodes
        else:
            attend = functional.scaled_dot_product_attention
        attended, _ = attend(query, key, value, mask, sinks=s_aux, causal=False, **options)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)


class _InPlaceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, `[B, Hkv, S, D]`, which grow within their buffers."""

    is_compileable, is_sliding = True, False

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of the new tokens, and return the buffers."""
        call = _CALL.get()
        self.keys = onnx_attention.append(self.keys, key_states, call.past_length)
        self.values = onnx_attention.append(self.values, value_states, call.past_length)
        call.written.append(self.keys)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Return how many keys there are. The mask, which adds them itself, does not read it."""
        return _CALL.get().seen

    def get_mask_sizes(self, _: int) -> tuple[int, int]:
        """Return the number of keys and the first one."""
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        """Return that there is no maximum."""
        return -1


class CapturedDecoder(nn.Module):
    """A decoder with caches in place, its own positions and masks, and no input for padding.

    Its model is as it was between runs.

    Attributes:
        reads_length: Whether the model reads how many keys the cache holds, for more than masks and
            positions. As transformers pads on the left, that is the longest past of the batch.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.reads_length = model, False
        self._nodes = SingleNodes(model)

    def forward(
        self, input_ids: Tensor, past_length: Tensor, logit_index: Tensor | None = None,
        **caches: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Return logits `[B, K, V]`, then the written keys and values of each layer.

        `input_ids`: int64 `[B, L]`.
        `past_length`: int64 `[B]`.
        `logit_index`: The positions among the new tokens, int64 `[B, K]`; all if None.
        `caches`: ``past_key_0 [B, Hkv, S, D]``, ``past_value_0 [B, Hkv, S, Dv]``, and so on.
        """
        seen = past_length.max() if self.reads_length else 0
        return self._run(Call(past_length, seen=seen), input_ids, logit_index, caches)

    def _run(
        self, call: Call, ids: Tensor, index: Tensor | None, caches: Mapping[str, Tensor]
    ) -> list[Tensor]:
        layers: Any = [
            _InPlaceLayer(caches[f"past_key_{layer}"], caches[f"past_value_{layer}"])
            for layer in range(_layers(caches))
        ]
        nodes = self._nodes.inside(self.model)
        with attending(self.model, call), nodes, self._cut(index, call):
            logits = self._logits(call, ids, Cache(layers=layers), caches)
        return [logits, *(x for layer in layers for x in (layer.keys, layer.values))]

    def _logits(self, call: Call, ids: Tensor, own: Cache, _: Mapping[str, Tensor]) -> Tensor:
        """Return what the model gives for the new tokens; `own` are the caches of their layers."""
        model: Any = self.model
        length: Any = call.past_length
        logits: Tensor = model(
            input_ids=ids, past_key_values=own, use_cache=True,
            position_ids=functional.positions(length, ids.shape[1]),
        ).logits  # fmt: skip
        return logits

    @contextlib.contextmanager
    def _cut(self, index: Tensor | None, call: Call) -> Iterator[None]:
        """Reduce what the output layer takes to the positions whose logits are wanted."""
        if index is None:
            yield
            return

        def cut(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = given[0]
            call.cut += 1
            wanted = index[..., None].expand(-1, -1, hidden.shape[-1])
            return (hidden.gather(1, wanted), *given[1:])

        model: Any = self.model
        head = model.get_output_embeddings()
        handle = head.register_forward_pre_hook(cut)
        try:
            yield
        finally:
            handle.remove()

    def prove(self, example: Mapping[str, Tensor]) -> None:
        """Refuse a model that attends without calling our function once in each layer.

        `example`: Inputs of `forward`.
        """
        kind = self.model.config.model_type
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ExportError(f"{kind} takes no position_ids, which caches in place need")
        self._nodes.prove(lambda: self._tried(example, 0)[1])
        call, logits = self._tried(example, 0)
        layers, calls = _layers(example), len(call.attended)
        if calls != layers or len(set(map(id, call.attended))) != layers:
            raise ExportError(
                f"{kind} has attention of its own: of {layers} layers, {calls} call transformers' "
                "AttentionInterface"
            )
        if not all(mask.all() for mask in call.padding):
            raise ExportError(f"{kind} masks padding by itself, which the graph does not know")
        if "logit_index" in example and call.cut != 1:
            raise ExportError(
                f"{kind} has an output layer of its own, so logits of single positions cannot be "
                "cut; give --all-logits"
            )
        # Some layers scale by the number of keys that transformers counts for the whole batch.
        _, others = self._tried(example, _MANY)
        self.reads_length = not torch.equal(logits, others)

    def _tried(self, example: Mapping[str, Tensor], seen: int) -> tuple[Call, Tensor]:
        """Return a run and its logits; `seen` is what the cache says that it holds."""
        given = dict(example)
        call = Call(given.pop("past_length"), seen=seen)
        try:
            with torch.inference_mode():
                logits, *_ = self._run(
                    call, given.pop("input_ids"), given.pop("logit_index", None), given
                )
        except Exception as error:  # as various as the models
            raise ExportError(
                f"{self.model.config.model_type} does not run with a cache in place: "
                f"{one_line(error)}"
            ) from error
        return call, logits


def _layers(caches: Mapping[str, Tensor]) -> int:
    return sum(name.startswith("past_key_") for name in caches)
