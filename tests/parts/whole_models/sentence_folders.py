"""Tiny folders of sentence-transformers with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
from tiny_encoders import tiny_encoder

MEAN = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
LAST = {"embedding_dimension": 32, "pooling_mode": "lasttoken"}
DENSE = {
    "in_features": 32, "out_features": 32,
    "activation_function": "torch.nn.modules.activation.Tanh",
}  # fmt: skip

Layer = tuple[str, Mapping[str, Any]]


def sentence_folder(
    folder: Path, pooling: Mapping[str, Any], layers: Sequence[Layer] = (("Normalize", {}),),
    kind: str = "bert", architecture: str = "", **fields: Any,
) -> Path:  # fmt: skip
    """Write a folder with a transformer, a pooling and layers on the vector, and return it."""
    tiny_encoder(kind, architecture, **fields).save_pretrained(folder)
    modules: list[Layer] = [("Transformer", {}), ("Pooling", pooling), *layers]
    entries = []
    for number, (name, config) in enumerate(modules):
        path = f"{number}_{name}" if number else ""
        entries.append({
            "idx": number, "name": str(number), "path": path,
            "type": f"sentence_transformers.models.{name}",
        })  # fmt: skip
        if config:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(config))
        if name == "Dense":
            torch.manual_seed(1)
            linear = torch.nn.Linear(config["in_features"], config["out_features"])
            weights = {f"linear.{n}": x.detach() for n, x in linear.named_parameters()}
            safetensors.torch.save_file(weights, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 12, "do_lower_case": true}'
    )
    return folder


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters, whose pairs have a separator and types, as BERT's have."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
    vocabulary |= {chr(97 + n): 4 + n for n in range(26)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )  # fmt: skip
    tokenizer.enable_padding(length=9)  # which embed leaves out, as it pads itself
    tokenizer.save(str(folder / "tokenizer.json"))
