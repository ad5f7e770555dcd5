"""Each attention of a saved encoder and decoder gives what it gives within the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from shared import extended

from attn_export import Subject

B, L, S = 2, 6, 9
TOKENS = {
    "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
SIDES = {
    **TOKENS, "d_model": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 6,
    "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
T5 = {
    **TOKENS, "d_model": 32, "num_heads": 3, "d_kv": 5, "d_ff": 48, "num_layers": 3,
    "num_decoder_layers": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}  # fmt: skip
SOUND = {"num_mel_bins": 8, "max_source_positions": S, "max_target_positions": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {**SIDES, "max_position_embeddings": 64}),
    "mbart": ("MBart", {**SIDES, "max_position_embeddings": 64}),
    "t5": ("T5", T5),
    "mt5": ("MT5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "whisper": ("Whisper", {**SIDES, **SOUND}),
}
DEFAULT = {"t5", "whisper"}
NAMES = ("SelfAttention", "EncDecAttention", "self_attn", "encoder_attn")


def saved(name: str, folder) -> torch.nn.Module:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)
    return model


def inside(model: torch.nn.Module) -> dict[str, tuple[list[torch.Tensor], torch.Tensor]]:
    """Return what each attention is given within the model, and what it returns, by its name."""
    found: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def keep(name: str):
        def hook(_, arguments, options, returned) -> None:
            query = arguments[0] if arguments else options["hidden_states"]
            key = options.get("key_value_states")
            found[name] = ([query] if key is None else [query, key, key], returned[0])

        return hook

    for name, module in model.named_modules():
        if name.split(".")[-1] in NAMES:
            module.register_forward_hook(keep(name), with_kwargs=True)
    ids = torch.arange(B * S).reshape(B, S) + 3
    given = {"input_ids": ids}
    if model.main_input_name == "input_features":
        given = {"input_features": torch.randn(B, 8, 2 * S)}
    with torch.inference_mode():
        model(**given, decoder_input_ids=ids[:, :L])
    return found


@pytest.mark.parametrize("name", extended(MODELS, lambda name: name in DEFAULT))
@pytest.mark.filterwarnings("ignore")
def test_each_attention_of_both_sides_is_that_of_the_model(name: str, tmp_path):
    attentions = inside(saved(name, tmp_path))
    assert len(attentions) == 3 + 2 * 2  # of the encoder, and two for each layer of the decoder
    for place, (given, wanted) in attentions.items():
        subject = Subject.from_checkpoint(tmp_path, layer=place)
        inputs = dict(zip(("query", "key", "value"), given, strict=False))
        assert set(inputs) == set(subject.inputs)
        with torch.inference_mode():
            found = subject.call(subject.module, inputs)
        torch.testing.assert_close(next(iter(found.values())), wanted, rtol=1e-4, atol=1e-5)
