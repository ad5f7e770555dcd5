"""Why a whole model is wrong: faults made in float32 models are named by the float64 one's."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, DynamicCache, EncoderDecoderCache, masking_utils

from attn_export.explain.explanation import Cause, SearchWork
from attn_export.parts.whole_models.faults.model_search import find_cause
from attn_export.parts.whole_models.model_caches import cache_name
from attn_export.reference.float64_mode import ComputeInFloat64, widened_copy
from attn_export.reference.operations import math_backend

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
WINDOWED = {**SMALL, "head_dim": 16, "sliding_window": 4}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SMALL, "attention_bias": True}),
    "cohere": ("CohereForCausalLM", {**SMALL, **TOKENS}),
    "glm": ("GlmForCausalLM", {
        **SMALL, **TOKENS, "head_dim": 16,
        "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5},
    }),
    "helium": ("HeliumForCausalLM", {**SMALL, **TOKENS, "head_dim": 8}),
    "apertus": ("ApertusForCausalLM", {**SMALL, **TOKENS}),
    "granite": ("GraniteForCausalLM", {**SMALL, **TOKENS, "embedding_multiplier": 3.0}),
    "qwen3": ("Qwen3ForCausalLM", {**SMALL, "head_dim": 16}),
    "gemma3_text": ("Gemma3ForCausalLM", {
        **WINDOWED, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
    }),
    "gemma2": ("Gemma2ForCausalLM", {**WINDOWED, "attn_logit_softcapping": 5.0}),
    "mistral": ("MistralForCausalLM", {**SMALL, "sliding_window": 4}),
    "phi3": ("Phi3ForCausalLM", {
        **SMALL, "pad_token_id": 0, "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5},
    }),
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    }),
    "gpt_oss": ("GptOssForCausalLM", {
        **WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN,
    }),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bert": ("BertForMaskedLM", {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    }),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
    }),
    "whisper": ("WhisperForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 8, "pad_token_id": 0,
        "max_target_positions": 32, "decoder_start_token_id": 1, "bos_token_id": 1,
        "eos_token_id": 2,
    }),
}  # fmt: skip


def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a model with random weights, and norms and biases that matter."""
    kind, config = MODELS[name]
    model = getattr(transformers, kind)._from_config(
        CONFIG_MAPPING[name](**{**config, **changes}),
        attn_implementation="eager", experts_implementation="eager",
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for path, old in model.named_parameters():
        new = torch.randn(old.shape, generator=generator)
        is_norm = old.ndim == 1 and path.endswith("weight")
        wanted = (
            old + 0.3 * new
            if is_norm
            else new * (0.5 if old.ndim == 1 else 1.5 * old.shape[-1] ** -0.5)
        )
        old.data.copy_(wanted)
    model.tie_weights()
    return model


class Recorded(DynamicCache):
    """A cache that remembers the new keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.new: dict[int, Any] = {}

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.new[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def outputs(model: Any) -> dict[str, np.ndarray]:
    """Return the outputs for a prompt padded on the left, and for tokens after a random past."""
    config, found = model.config, {}
    name, dtype = config.model_type, next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 64, (3, 9), generator=generator)
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [0] * 5 + [1] * 4])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    calls: list[tuple[Any, torch.Tensor, dict[str, Any]]] = []
    if name == "bert":
        calls = [(None, mask, {"input_ids": ids, "attention_mask": mask})]
    elif config.is_encoder_decoder:
        decoder = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        features = torch.randn(3, 8, 16, generator=generator).to(dtype)
        encoder = {"input_ids": ids.flip(0), "attention_mask": mask}
        encoder = {"input_features": features} if name == "whisper" else encoder
        cache: Any = EncoderDecoderCache(Recorded(config), Recorded(config))
        calls = [(cache, mask, {**encoder, **decoder})]
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or 32 // config.num_attention_heads
        filled = Recorded(config)
        for layer in range(2):
            pair = torch.randn(2, 3, heads, 6, size, generator=generator).to(dtype)
            filled.update(*pair, layer)
        for cache, new in ((Recorded(config), slice(None)), (filled, slice(6, None))):
            kwargs = {"input_ids": ids[:, new], "position_ids": positions[:, new]}
            calls.append((cache, mask[:, new], {**kwargs, "attention_mask": mask}))
    for number, (cache, valid, kwargs) in enumerate(calls):
        cached = {} if cache is None else {cache_name(model): cache, "use_cache": True}
        found[f"logits {number}"] = model(**kwargs, **cached).logits * valid[..., None]
        own = getattr(cache, "self_attention_cache", cache)
        for layer, pair in own.new.items() if own is not None else ():
            for part, tensor in zip("kv", pair, strict=True):
                found[f"{part}{layer} {number}"] = tensor * valid[:, None, :, None]
    return {key: tensor.detach().numpy().copy() for key, tensor in found.items()}


def run(model: nn.Module) -> dict[str, np.ndarray]:
    with math_backend(ComputeInFloat64()):
        return outputs(model)


def cause_of(name: str, wrong: nn.Module, seconds: float = 60.0) -> Cause | None:
    got = outputs(wrong)
    return find_cause(widened_copy(model_of(name)), run, got, SearchWork(seconds).is_over)


def rebuilt(**changes: Any) -> Callable[[Any, str], Any]:
    """Return the model of another config with the same weights."""

    def build(right: Any, name: str) -> Any:
        wrong = model_of(name, **changes)
        wrong.load_state_dict(right.state_dict(), strict=False)
        return wrong

    return build


def layers_of(model: Any) -> Any:
    paths = ("model.layers", "transformer.h", "bert.encoder.layer", "decoder.block")
    return next(m for path, m in model.named_modules() if path in (*paths, "model.decoder.layers"))


def each(change: Callable[[Any], object], layers: slice = slice(None), suffix: str = "") -> Any:
    """Return a model whose modules of a class are changed, in some layers."""

    def apply(model: Any, _: str) -> None:
        for layer in layers_of(model)[layers]:
            for module in layer.modules():
                if type(module).__name__.endswith(suffix):
                    change(module)

    return apply


def parameters(part: str, change: Callable[[Any], Any]) -> Any:
    def apply(model: Any, _: str) -> None:
        found = [p for path, p in model.named_parameters() if part in path]
        assert found
        for parameter in found:
            parameter.data = change(parameter.data).clone()

    return apply


def call(name: str, change: Callable[[Any, Any], Any]) -> Any:
    """Return a model that reads an input otherwise."""

    def apply(model: Any, _: str) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, name: change(kwargs[name], kwargs)}

        model.register_forward_pre_hook(before, with_kwargs=True)

    return apply


def swapped(one: str, other: str) -> Any:
    def apply(model: Any, _: str) -> None:
        for layer in layers_of(model):
            a, b = layer.get_submodule(one), layer.get_submodule(other)
            for x, y in zip(a.parameters(), b.parameters(), strict=True):
                x.data, y.data = y.data, x.data

    return apply


def patched(file: Any, name: str, new: Callable[..., Any]) -> Any:
    """Return a model whose calls see another function of a file."""

    def apply(model: Any, _: str) -> None:
        module = file or sys.modules[type(model).__module__]
        old, forward = getattr(module, name), model.forward

        def wrong(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, module, name, old)
                setattr(module, name, lambda *a, **k: new(old, *a, **k))
                return forward(*args, **kwargs)

        model.forward = wrong

    return apply


def interleaved(_: Any, q: Any, k: Any, cos: Any, sin: Any, **__: Any) -> Any:
    half = cos.shape[-1] // (2 if torch.equal(*cos.chunk(2, -1)) else 1)
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]

    def rotated(x: Any) -> Any:
        even, odd = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return torch.cat([turned.flatten(-2), x[..., 2 * half :]], -1)

    return rotated(q), rotated(k)


def upper_left(old: Any, **given: Any) -> Any:
    mask = old(**given)
    aligned = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return aligned & given["attention_mask"][:, None, None, :].bool()


def other_layer_order(model: Any, _: str) -> None:
    first, second = layers_of(model)[:2]
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        a.data, b.data = b.data, a.data


def past_last(model: Any, _: str) -> None:
    update = Recorded.update

    class PastLast(Recorded):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any):
            both = update(self, key_states, value_states, layer_idx)
            new = key_states.shape[2]
            return tuple(torch.cat([x[..., -new:, :], x[..., :-new, :]], -2) for x in both)

    model.register_forward_pre_hook(
        lambda _, __, kwargs: setattr(kwargs[cache_name(model)], "__class__", PastLast),
        with_kwargs=True,
    )


ALL, SECOND = slice(None), slice(1, 2)
QUICK: list[tuple[str, str, Any]] = [
    ("llama", "positions", call("position_ids", lambda own, _: own[0].repeat(3, 1))),
    ("bert", "scale", each(lambda m: setattr(m, "scaling", 1.0), SECOND, "SelfAttention")),
    ("phi3", "rotary pairs", patched(None, "apply_rotary_pos_emb", interleaved)),
    ("mixtral", "experts", rebuilt(num_experts_per_tok=1)),
    ("llama", "padding", call("attention_mask", lambda mask, _: torch.ones_like(mask))),
    ("llama", "weight scale", parameters("layers.1.mlp.down", lambda x: x * 1.5)),
]  # fmt: skip
"""Architecture, kind of the cause or how it begins, and what makes a model wrong."""

MORE: list[tuple[str, str, Any]] = [
    ("t5", "activation", rebuilt(feed_forward_proj="gated-silu")),
    ("gemma3_text", "activation", rebuilt(hidden_activation="silu")),
    ("mistral", "window", rebuilt(sliding_window=64)),
    ("llama", "past", past_last),
    ("gpt2", "another checkpoint", lambda _, name: model_of(name, 7)),
    ("gpt_oss", "truncate is True", rebuilt(rope_parameters={**YARN, "truncate": True})),
    ("gpt_oss", "sinks", parameters("sinks", lambda x: x - 1e9)),
    ("whisper", "bias", parameters("v_proj.bias", torch.zeros_like)),
    ("llama", "eps", rebuilt(rms_norm_eps=3e-4)),
    ("llama", "activation", each(lambda m: setattr(m.mlp.act_fn, "forward", torch.relu), SECOND,
                                 "DecoderLayer")),
    ("llama", "rotary base", rebuilt(rope_parameters={**LOCAL, "rope_theta": 15000.0})),
    ("llama", "bias", rebuilt(attention_bias=False)),
    ("llama", "KV heads", patched(None, "repeat_kv", lambda _, x, n: torch.cat([x] * n, 1))),
    ("llama", "mask", patched(masking_utils, "sdpa_mask", upper_left)),
    ("llama", "tied head", lambda m, _: m.lm_head.weight.data.copy_(m.model.embed_tokens.weight)),
    ("llama", "norm", lambda m, _: setattr(m.model.norm, "forward", lambda x: x)),
    ("qwen3", "rotary pairs", patched(None, "apply_rotary_pos_emb", interleaved)),
    ("qwen3", "exchanged", swapped("self_attn.k_proj", "self_attn.v_proj")),
    ("qwen3", "norm", each(lambda m: setattr(m.q_norm, "forward", torch.clone), ALL, "Attention")),
    ("gemma3_text", "rotary base", rebuilt(
        rope_parameters={"full_attention": LOCAL, "sliding_attention": GLOBAL})),
    ("gemma3_text", "embedding scale", lambda m, _: m.model.embed_tokens.embed_scale.fill_(1.0)),
    ("gemma2", "softcap", rebuilt(attn_logit_softcapping=None)),
    ("gemma2", "layer types", rebuilt(layer_types=["sliding_attention"] * 2)),
    ("gemma2", "norm offset", parameters("norm.weight", lambda x: x - 1)),
    ("mistral", "layers", other_layer_order),
    ("phi3", "rotary part", rebuilt(rope_parameters={**LOCAL, "partial_rotary_factor": 1.0})),
    ("gpt2", "position embedding", parameters("wpe", lambda x: x.roll(-2, 0))),
    ("gpt2", "transposed weight", parameters("attn.c_proj.weight", lambda x: x.T)),
    ("gpt_oss", "rotary scaling", rebuilt(rope_parameters={**LOCAL, "rope_theta": 150000.0})),
    ("bert", "exchanged", swapped("attention.self.query", "attention.self.value")),
    ("whisper", "scale", each(lambda m: setattr(m, "scaling", 0.5), suffix="Attention")),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.extended) for case in MORE)],
    ids=lambda case: " ".join(case[:2]),
)  # fmt: skip
def test_the_fault_that_was_made_is_the_cause(case: tuple[str, str, Any]):
    name, kind, make = case
    right = model_of(name)
    made = make(right, name)
    cause = cause_of(name, made if isinstance(made, nn.Module) else right)
    assert cause is not None
    assert cause.kind == kind or cause.sentence.startswith(kind), cause


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"rope_parameters": {**LOCAL, "rope_theta": 9500.0}},
         r"rope_theta is 9500 where the config says 10000 \("),
        ("llama", {"rope_parameters": {**LOCAL, "rope_theta": 9876.54}}, r"rope_.* \(a fit\)"),
        ("cohere", {"logit_scale": 0.1, "layer_norm_eps": 1e-2},
         r"(?=.*logit_scale is 0\.1 where).*layer_norm_eps is 0\.01 where"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)  # fmt: skip
def test_numbers_that_were_sought_are_round_or_called_a_fit(
    name: str, changes: Mapping[str, Any], said: str
):
    cause = cause_of(name, rebuilt(**changes)(model_of(name), name))
    assert cause is not None
    assert re.match(said, cause.sentence), cause


BASE, PART = ({**LOCAL, "rope_theta": 5e4, "partial_rotary_factor": x} for x in (0.5, 1.0))
PAIRS: Mapping[str, tuple[str, Mapping[str, Any], str, str]] = {
    "glm base and part": (
        "glm", {"rope_parameters": PART}, "rope_theta is 50000", "partial_rotary_factor is 1",
    ),
    "glm base and eps": (
        "glm", {"rope_parameters": BASE, "rms_norm_eps": 1e-2},
        "rope_theta is 50000", "rms_norm_eps is 0.01",
    ),
    "glm base and activation": (
        "glm", {"rope_parameters": BASE, "hidden_act": "gelu"},
        "rope_theta is 50000", "hidden_act is gelu",
    ),
    "cohere scale and activation": (
        "cohere", {"logit_scale": 0.1, "hidden_act": "gelu"},
        "logit_scale is 0.1", "hidden_act is gelu",
    ),
    "helium base and eps": (
        "helium", {"rope_parameters": {**LOCAL, "rope_theta": 5e4}, "rms_norm_eps": 1e-2},
        "rope_theta is 50000", "rms_norm_eps is 0.01",
    ),
    "apertus eps and activation": (
        "apertus", {"hidden_act": "relu", "rms_norm_eps": 1e-2},
        "hidden_act is relu", "rms_norm_eps is 0.01",
    ),
}  # fmt: skip
"""Two wrong fields: architecture, fields, and what is said of each."""


@pytest.mark.extended
@pytest.mark.parametrize("name", PAIRS)
def test_both_of_two_wrong_fields_are_named_with_their_values(name: str):
    kind, changes, *said = PAIRS[name]
    cause = cause_of(kind, rebuilt(**changes)(model_of(kind), kind), 90.0)
    assert cause is not None
    assert not cause.is_fit, cause
    for each_said in said:
        assert f"{each_said} where the config says" in cause.sentence, cause


@pytest.mark.extended
def test_fields_that_explain_an_error_alike_are_both_named():
    """Norms undo a scale of all: half of each residual is twice the embedding."""
    wrong = rebuilt(residual_multiplier=0.5)(model_of("granite"), "granite")
    cause = cause_of("granite", wrong)
    assert cause is not None
    assert "residual_multiplier is 0.5 where the config says 1.0" in cause.sentence, cause
    assert "embedding_multiplier is 6 where the config says 3.0" in cause.sentence, cause


def test_a_search_ends_by_its_work_alone():
    wrong = rebuilt(hidden_act="gelu", rms_norm_eps=1e-2)(model_of("llama"), "llama")
    right, got = widened_copy(model_of("llama")), outputs(wrong)
    few, again = (SearchWork(0.3, "--search-more") for _ in range(2))
    causes = [find_cause(right, run, got, work.is_over) for work in (few, again)]
    assert few.ended_early
    assert few.runs == again.runs > 1
    assert causes[0] == causes[1]
    (note,) = few.note()
    assert note.endswith(f"after {few.runs} trial runs: --search-more goes on")


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("mistral", "sliding_window", 8),
        pytest.param("gemma2", "final_logit_softcapping", 3.0, marks=pytest.mark.extended),
    ],
)
def test_what_the_config_leaves_out_is_named(name: str, field: str, wrong: float):
    right = model_of(name, **{field: None})
    got = outputs(rebuilt(**{field: wrong})(right, name))
    cause = find_cause(widened_copy(right), run, got, SearchWork(math.inf).is_over)
    assert cause is not None
    assert re.match(rf"{field} is {wrong:.0f}\S* where the config says None \(", cause.sentence)


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        *(pytest.param(name, marks=pytest.mark.extended) for name in MODELS if name != "bert"),
    ],
)
def test_a_right_model_has_no_cause_and_is_as_before_in_the_end(name: str):
    model = widened_copy(model_of(name))
    before, (got, reference) = dict(vars(model)), (outputs(model_of(name)), run(model))
    assert find_cause(model, run, got, SearchWork(math.inf).is_over) is None
    after = run(model)
    assert vars(model).keys() == before.keys()
    assert all(np.array_equal(after[key], reference[key]) for key in reference)
