"""Hostile checkpoints and exports of whole models, which `compare --model --graphs` reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hostile.bundles import Random, damaged, displace, maker, pick
from hostile.values import changed

EXPORTS = Path(__file__).with_name("exports")


@maker
def whole_model(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage a config, tensors, a graph or the names of one."""
    del bundle
    place.mkdir()
    checkpoint, graphs = place / "checkpoint", place / "graphs"
    shutil.copytree(EXPORTS / "qwen2" / "checkpoint", checkpoint)
    # The graphs of another model: what is read without complaint is refused all the same.
    shutil.copytree(EXPORTS / "llama" / "genai", graphs)
    files = [
        checkpoint / "config.json", checkpoint / "model.safetensors",
        graphs / "genai_config.json", graphs / "model.onnx",
    ]  # fmt: skip
    path = pick(random, [files[0], *files])
    if path.suffix == ".json" and random.random() < 0.8:
        path.write_text(json.dumps(changed(json.loads(path.read_text()), random)))
    elif random.random() < 0.15:
        displace(path, random)
    else:
        path.write_bytes(damaged(path.read_bytes(), random))
    return ["compare", "--model", str(checkpoint), "--graphs", str(graphs), "--runtime", "ort-cpu"]
