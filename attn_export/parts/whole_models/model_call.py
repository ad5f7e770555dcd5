"""A whole model as transformers runs it, called with the inputs of an exported graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from attn_export.bundle.text_inputs import VECTOR
from attn_export.errors import ExportError, printable
from attn_export.parts.whole_models.export_layouts import End, Entry, Role
from attn_export.parts.whole_models.model_caches import cache_name
from attn_export.runtimes.decode_inputs import NEXT_HIDDEN

Rounding = Callable[..., tuple[Tensor, ...]]
"""Returns keys and values as a cache stores them; called with the number of the layer and them."""


class _Recorded(DynamicCache):
    """A cache that remembers the keys and values of the tokens of a run.

    Attributes:
        new: Them by the number of the layer, `[B, Hkv, L, D]`.
        rounds: What rounds them, if they are stored in a narrower type than the model's.
    """

    def __init__(self, config: Any, rounds: Rounding | None) -> None:
        super().__init__(config=config)
        self.new: dict[int, tuple[Tensor, ...]] = {}
        self.rounds = rounds

    def hold(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Append those of the past, which are stored."""
        if self.rounds is not None:
            key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (key, value))
        super().update(key, value, layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values to a layer."""
        new = self.new[layer_idx] = key_states, value_states
        if self.rounds is not None:
            stored = self.new[layer_idx] = self.rounds(layer_idx, *new)
            new = stored[0].to(key_states.dtype), stored[1].to(value_states.dtype)
        return super().update(*new, layer_idx, *args, **kwargs)


class ModelCall(nn.Module):
    """A model with the inputs and outputs of one graph, by their names in it.

    Its own cache and masks are used. Batches are padded on the left, as `generate` does: the pasts
    of a cache of fixed size, which start at its first slot, are moved.

    `entry`: The graph, whose inputs and outputs are known.

    Attributes:
        is_decoder: Whether the graph has caches, or reads an encoder's output.
        rounds: What rounds keys and values for the cache, if it has another type than the model.
        others: The layers that are left out. Masks ask them, too, how many keys there are.
    """

    rounds: Rounding | None = None
    others: Collection[int] = ()

    def __init__(self, model: PreTrainedModel, entry: Entry) -> None:
        super().__init__()
        self.model, self.entry = model, entry
        self.config: Any = model.config
        # Heads on an encoder alone have the config of both.
        has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
        self._has_encoder = bool(self.config.is_encoder_decoder) and has_decoder
        has_cache = bool(entry.having("past") or entry.having("present"))
        self.is_decoder = has_cache or (self._has_encoder and entry.one("states") is not None)

    def forward(self, **given: Tensor) -> list[Tensor]:
        """Return the outputs of the graph, in its order."""
        inputs = _Given(self.entry, given)
        if not self.is_decoder:
            callee: Any = self.model.get_encoder() if self._has_encoder else self.model
            return self._outputs(callee(**self._plain(callee, inputs)), inputs, None, None)
        own, mask = self._cache(inputs)
        kwargs: dict[str, Any] = {cache_name(self.model): own, "use_cache": True}
        ids, cross = inputs.roles["ids"], None
        if self._has_encoder:
            cross = DynamicCache(config=self.model.config)
            branch = inputs.roles.get("branch")
            # They are made from the encoder's output by a merged decoder without a past, and by one
            # that does not read them.
            is_first = branch is not None and not branch.any()
            made = is_first or ("states" in inputs.roles and inputs.ignores("encoder"))
            for layer, (key, value) in inputs.pasts("encoder").items():
                if key.shape[2] and not made:
                    cross.update(key, value, layer)
            kwargs |= {
                "decoder_input_ids": ids, "encoder_outputs": self._states(inputs),
                cache_name(self.model): EncoderDecoderCache(own, cross),
                "attention_mask": inputs.roles.get("states mask"),
            }  # fmt: skip
            if "mask" in inputs.roles:
                kwargs["decoder_attention_mask"] = mask
            if "positions" in inputs.roles:
                kwargs["decoder_position_ids"] = inputs.roles["positions"]
        else:
            kwargs |= {"input_ids": ids, "attention_mask": mask}
            # By default the model makes its own positions, as in the graph.
            if "positions" in inputs.roles:
                kwargs["position_ids"] = inputs.roles["positions"]
            if "token types" in inputs.roles:
                kwargs["token_type_ids"] = inputs.roles["token types"]
        return self._outputs(self.model(**kwargs), inputs, own, cross)

    def _plain(self, callee: nn.Module, inputs: _Given) -> dict[str, Any]:
        """Return the arguments of a model without a cache."""
        accepted = inspect.signature(callee.forward).parameters
        own = {end.role: end.usual or end.name for end in self.entry.inputs.values()}
        features = (own.get("features", ""), *_FEATURES)
        names = {
            "ids": "input_ids", "mask": "attention_mask", "positions": "position_ids",
            "token types": "token_type_ids",
            # A graph may take the sounds of a model by another name.
            "features": next((n for n in features if n in accepted), ""),
        }  # fmt: skip
        given = {names[role]: tensor for role, tensor in inputs.roles.items() if role in names}
        return given | ({"use_cache": False} if "use_cache" in accepted else {})

    def _cache(self, inputs: _Given) -> tuple[_Recorded, Tensor]:
        """Return the cache, and the mask `[B, P + L]`."""
        ids, write_at = inputs.roles["ids"], inputs.roles.get("write at")
        # A variant's window, not that of the right model: keys that it sees must stay.
        own, past = _Recorded(self.model.config, self.rounds), 0
        pasts = inputs.pasts("decoder")
        for layer, pair in pasts.items():
            key, value = (self._whole(x, layer, inputs) for x in pair)
            if key.shape[2]:
                own.hold(key, value, layer)
            past = max(past, key.shape[2])
        for layer in self.others:
            none = key.new_zeros(len(ids), 1, past, 1)
            own.hold(none, none, layer)
        mask = inputs.roles.get("mask")
        if write_at is not None:
            mask = _mask_of(write_at, inputs.roles["lengths"], past, ids.shape[1])
        if mask is None:
            mask = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.int64)
        return own, mask

    def _whole(self, cache: Tensor, layer: int, inputs: _Given) -> Tensor:
        """Return a cache as `[B, Hkv, P, D]`, whose keys end at the last slot."""
        past, write_at = inputs.rolled(layer), inputs.roles.get("write at")
        if past is not None:
            kept = cache[:, :, :past]
            # No query sees the keys that have left it.
            return nn.functional.pad(kept, (0, 0, past - kept.shape[2], 0))
        return cache if write_at is None else self._moved(cache, write_at)

    def _moved(self, cache: Tensor, write_at: Tensor) -> Tensor:
        """Return a cache of fixed size as `[B, Hkv, P, D]`, whose keys end at the last slot."""
        if cache.ndim == 3:  # [B, S, Hkv * D]
            config = self.config.get_text_config(decoder=True)
            size = getattr(config, "head_dim", None)
            size = size or config.hidden_size // config.num_attention_heads
            cache = cache.unflatten(-1, (-1, size)).transpose(1, 2)
        past = int(write_at.max())
        slots = torch.arange(past) - (past - write_at)[:, None]  # [B, P]
        index = slots.clamp(min=0)[:, None, :, None]
        return cache.gather(2, index.expand(-1, cache.shape[1], -1, cache.shape[3]))

    def _states(self, inputs: _Given) -> BaseModelOutput:
        """Return the encoder's output; zeros if its keys and values are in the cache."""
        states = inputs.roles.get("states")
        if states is None:
            key, _ = next(iter(inputs.pasts("encoder").values()))
            states = key.new_zeros(key.shape[0], key.shape[2], self.config.hidden_size)
        return BaseModelOutput(last_hidden_state=states)

    def _outputs(self, result: Any, inputs: _Given, own: Any, cross: Any) -> list[Tensor]:
        """Return the outputs of the graph from the model's."""
        outputs = []
        for name, end in self.entry.outputs.items():
            if end.role == "window":
                outputs.append(inputs.by_name[name.replace("output.", "input.")])
            elif end.role == "present":
                outputs.append(self._present(end, inputs, own, cross))
            else:
                outputs.append(self._value(result, end))
        return outputs

    def _value(self, result: Any, end: End) -> Tensor:
        """Return a field of the model's output; of logits, the last if a graph has no others."""
        usual = end.usual or end.name
        value = result
        for part in _FIELDS.get(usual, usual).split("."):
            is_item = isinstance(value, list | tuple) and part.isdecimal() and len(part) < 5
            if is_item and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, Tensor):
            raise ExportError(_no_output(result, end, self.entry))
        if end.usual != "logits" or value.ndim != 3 or self.entry.takes_one_token:
            return value
        if len(end.shape) == 2 and end.shape[1] == value.shape[2]:
            return value[:, -1]
        return value[:, -1:] if len(end.shape) == 3 and end.shape[1] == 1 else value

    def _present(self, end: End, inputs: _Given, own: _Recorded, cross: Any) -> Tensor:
        """Return keys or values after a run: those of the past, then those of the new tokens."""
        index = ("key", "value").index(end.part)
        if end.of == "encoder":
            layer = cross.layers[end.layer]
            encoded: Tensor = (layer.keys, layer.values)[index]
            branch = inputs.roles.get("branch")
            # A merged decoder that reads them leaves them out.
            return encoded if branch is None or not branch.any() else encoded[:0, :, :1]
        new, pasts = own.new[end.layer][index], inputs.pasts("decoder")
        if end.layer not in pasts:
            return new
        past, write_at = pasts[end.layer][index], inputs.roles.get("write at")
        new = new.to(past.dtype)
        before = inputs.rolled(end.layer)
        if before is not None:
            kept = torch.cat([past[:, :, :before], new], 2)[:, :, -past.shape[2] :]
            return torch.cat([kept, past[:, :, kept.shape[2] :]], 2)
        if write_at is None:
            return torch.cat([past, new], 2)
        slots = write_at[:, None] + torch.arange(new.shape[2])
        if past.ndim == 4:
            return past.scatter(2, slots[:, None, :, None].expand_as(new), new)
        flat = new.transpose(1, 2).flatten(2)
        return past.scatter(1, slots[..., None].expand_as(flat), flat)


def _no_output(result: Mapping[str, Any], end: End, entry: Entry) -> str:
    """Return what is wrong with an output, and how to name it where that can help."""
    given = {name: x.ndim for name, x in result.items() if isinstance(x, Tensor)}
    used = {each.usual for each in entry.outputs.values()}
    free = [n for n, axes in given.items() if n not in used and axes == len(end.shape)]
    name = printable(end.name, 60)
    text = f"{entry.path}: {name} is no output of the model, which gives {', '.join(given)}"
    if end.usual == VECTOR:
        return f"{text}; give the folder of sentence-transformers, with modules.json"
    return f"{text}; if it is {free[0]}, give --name {free[0]}={name}" if free else text


class _Given:
    """The inputs of a run.

    Attributes:
        roles: The inputs by role, without caches.
    """

    def __init__(self, entry: Entry, by_name: Mapping[str, Tensor]) -> None:
        self.by_name, self._ends, self._unread = by_name, entry.inputs, entry.unread
        self.roles: dict[Role, Tensor] = {
            end.role: by_name[name] for name, end in entry.inputs.items() if end.role != "past"
        }

    def rolled(self, layer: int) -> int | None:
        """Return the number of keys before the run, if the cache of a layer rolls."""
        if any(end.rolls and end.layer == layer for end in self._ends.values()):
            return self.roles["mask"].shape[1] - self.roles["ids"].shape[1]
        return None

    def ignores(self, of: str) -> bool:
        """Return whether the graph reads none of the caches."""
        ends = {e.name for e in self._ends.values() if e.role == "past" and e.of == of}
        return ends <= self._unread

    def pasts(self, of: str) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys and values by the number of the layer."""
        found: dict[int, dict[str, Tensor]] = {}
        for name, end in self._ends.items():
            if end.role == "past" and end.of == of:
                found.setdefault(end.layer, {})[end.part] = self.by_name[name]
        return {layer: (pair["key"], pair["value"]) for layer, pair in sorted(found.items())}


_FIELDS = {"encoder_hidden_states": "last_hidden_state", NEXT_HIDDEN: "logits"}
"""Fields of the model's output by names of outputs that differ."""

_FEATURES = ("input_features", "input_values", "pixel_values")


def _mask_of(write_at: Tensor, lengths: Tensor, past: int, query_len: int) -> Tensor:
    """Return the mask `[B, P + L]` of pasts that end at the last slot, and of new tokens."""
    before = torch.arange(past) >= (past - write_at)[:, None]
    new = torch.arange(query_len) < (lengths - write_at)[:, None]
    return torch.cat([before, new], 1).long()
