"""One whole model in one engine, in a process that answers requests, one JSON line each.

It runs in the environment of its engine, so it imports nothing of this package but for our own
bundles: ``python model_runner.py ENGINE FOLDER THREADS VOCABULARY``. The request ``{"batch": B,
"length": L, "most": m, "count": n}`` draws prompts of L tokens, which are the same in each engine,
and takes n of at most m tokens; ``{"count": n}`` takes more of them. An answer has the seconds of
each token, in the first of which is the prompt, and the tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Tokens = Iterator[np.ndarray]
"""The next token of each prompt, int64 `[B]`, as soon as it is known."""


def ours(folder: Path, threads: int) -> Callable[..., Tokens]:
    from attn_export import DecodeSession

    session = DecodeSession(folder, threads=threads)
    return lambda ids, count: session.generate(ids, count)


def genai(folder: Path, threads: int) -> Callable[..., Tokens]:
    og: Any = importlib.import_module("onnxruntime_genai")  # in an environment of its own

    config = folder / "genai_config.json"
    fields = json.loads(config.read_text())
    fields["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": threads}
    config.write_text(json.dumps(fields))
    model = og.Model(str(folder))

    def generate(ids: np.ndarray, count: int) -> Tokens:
        given = og.GeneratorParams(model)
        given.set_search_options(
            batch_size=len(ids), max_length=ids.shape[1] + count, min_length=ids.shape[1] + count,
            do_sample=False,
        )  # fmt: skip
        generator = og.Generator(model, given)
        generator.append_tokens(ids.astype(np.int32))
        for _ in range(count):
            generator.generate_next_token()
            yield np.array(generator.get_next_tokens())

    return generate


def llama_cpp(folder: Path, threads: int) -> Callable[..., Tokens]:
    """Run a GGUF file with what llama.cpp has by default, as caches in float16."""
    llama: Any = importlib.import_module("llama_cpp")  # in an environment of its own
    given = llama.llama_model_default_params()
    model = llama.llama_model_load_from_file(bytes(folder / "model.gguf"), given)
    words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def generate(ids: np.ndarray, count: int) -> Tokens:
        batch, length = ids.shape
        options = llama.llama_context_default_params()
        options.n_seq_max, options.n_ctx = batch, batch * (length + count)
        options.n_batch = ids.size
        options.n_threads = options.n_threads_batch = threads
        context = llama.llama_init_from_model(model, options)
        filled, seen = llama.llama_batch_init(ids.size, 0, 1), 0
        try:
            for _ in range(count):
                filled.n_tokens, length = ids.size, ids.shape[1]
                for at, token in enumerate(ids.ravel().tolist()):
                    filled.token[at], filled.pos[at] = token, seen + at % length
                    filled.n_seq_id[at], filled.seq_id[at][0] = 1, at // length
                    filled.logits[at] = (at + 1) % length == 0
                if llama.llama_decode(context, filled):
                    raise RuntimeError("llama.cpp did not decode")
                last = range(length - 1, ids.size, length)
                logits = [llama.llama_get_logits_ith(context, at) for at in last]
                token = np.stack([np.ctypeslib.as_array(x, (words,)) for x in logits]).argmax(-1)
                ids, seen = token[:, None], seen + length
                yield token
        finally:
            llama.llama_batch_free(filled)
            llama.llama_free(context)

    return generate


def exported(folder: Path, threads: int) -> Callable[..., Tokens]:
    """Run graphs in ONNX Runtime whose caches grow, each as the next step's input, uncopied."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads

    def load(name: str) -> Any:
        return ort.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])

    names = sorted(path.name for path in folder.glob("*.onnx"))
    first = load(next((n for n in names if "prefill" in n), names[0]))
    later = load(next((n for n in names if "decode" in n), names[0])) if len(names) > 1 else first

    def generate(ids: np.ndarray, count: int) -> Tokens:
        caches: dict[str, Any] = {}
        tokens, seen = ids, 0
        for _ in range(count):
            session, seen = (later if caches else first), seen + tokens.shape[1]
            bound = session.io_binding()
            for given in session.get_inputs():
                if _cache(given.name) in caches:
                    bound.bind_ortvalue_input(given.name, caches[_cache(given.name)])
                else:
                    bound.bind_cpu_input(given.name, _input(given, tokens, seen))
            outputs = [x.name for x in session.get_outputs()]
            for name in outputs:
                bound.bind_output(name, "cpu")
            session.run_with_iobinding(bound)
            values = dict(zip(outputs, bound.get_outputs(), strict=True))
            caches = {_cache(name): value for name, value in values.items() if name != "logits"}
            logits = values[next(n for n in outputs if "logits" in n)].numpy()
            token = logits[:, -1].argmax(-1)
            tokens = token[:, None]
            yield token

    return generate


def _cache(name: str) -> str:
    """Return the name that an input and an output of one cache have in common."""
    return re.sub("^(in|out)put[.]|^present", "", name).removeprefix("past_key_values")


def _input(given: Any, tokens: np.ndarray, seen: int) -> np.ndarray:
    """Return an input of an exported graph that is no filled cache."""
    batch, length = tokens.shape
    if "input_ids" in given.name:
        return np.ascontiguousarray(tokens, np.int64)
    if "attention_mask" in given.name:
        return np.ones((batch, seen), np.int64)
    if "position" in given.name:
        positions = np.arange(seen - length, seen, dtype=np.int64)
        return positions if len(given.shape) == 1 else np.tile(positions, (batch, 1))
    shape = [batch, given.shape[1], 0, given.shape[3]]
    return np.zeros(shape, np.float32)


def openvino(folder: Path, threads: int) -> Callable[..., Tokens]:
    """Run optimum's graph with the caches as states, as optimum-intel does."""
    import openvino as ov
    from openvino._offline_transformations import apply_make_stateful_transformation

    core = ov.Core()
    model = core.read_model(folder / "model.onnx")
    ins = {n for x in model.inputs for n in x.names if n.startswith("past_key_values")}
    apply_make_stateful_transformation(
        model, {name: name.replace("past_key_values", "present") for name in ins}
    )
    options = {
        "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32", "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    request = core.compile_model(model, "CPU", options).create_infer_request()

    def generate(ids: np.ndarray, count: int) -> Tokens:
        for state in request.query_state():  # of no keys, but with the batch
            shape = state.state.shape
            empty = np.zeros((len(ids), shape[1], 0, shape[3]), np.float32)
            state.state = ov.Tensor(empty)
        tokens, seen = ids, 0
        for _ in range(count):
            seen += tokens.shape[1]
            result = request.infer(
                {
                    name: _input(_Named(name), tokens, seen)
                    for x in request.model_inputs
                    for name in list(x.names)[:1]
                }
            )
            token = result["logits"][:, -1].argmax(-1)
            tokens = token[:, None]
            yield token

    return generate


class _Named:
    shape = (None, None)

    def __init__(self, name: str) -> None:
        self.name = name


def compiled(folder: Path, threads: int) -> Callable[..., Tokens]:
    """Run transformers with a static cache, compiled by torch."""
    import torch
    from transformers import AutoModelForCausalLM, StaticCache

    from attn_export.parts.whole_models.model_caches import cache_name

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    step, name = torch.compile(model.forward), cache_name(model)

    def generate(ids: np.ndarray, count: int) -> Tokens:
        with torch.inference_mode():
            cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + count)
            tokens, seen = torch.from_numpy(ids), 0
            for number in range(count):
                length = tokens.shape[1]
                positions = torch.arange(seen, seen + length)
                forward = step if number else model.forward
                logits = forward(
                    input_ids=tokens, use_cache=True, logits_to_keep=1, **{name: cache},
                    position_ids=positions[None].expand(len(ids), -1),
                ).logits  # fmt: skip
                tokens, seen = logits[:, -1].argmax(-1, keepdim=True), seen + length
                yield tokens[:, 0].numpy()

    return generate


ENGINES = {
    "ours": ours, "genai": genai, "llama_cpp": llama_cpp, "exported": exported,
    "openvino": openvino, "compiled": compiled,
}  # fmt: skip


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    engine, folder, threads, words = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    generate = ENGINES[engine](folder, threads)
    running: Tokens = iter(())
    for line in sys.stdin:
        request = json.loads(line)
        start = 0.0
        if "length" in request:
            shape = request["batch"], request["length"]
            ids = np.random.default_rng(0).integers(3, words, shape, dtype=np.int64)
            running = iter(())  # frees the caches of the last prompt
            start = time.perf_counter()  # some read the prompt before the first token is asked for
            running = generate(ids, request["most"])
        seconds, tokens = [], []
        for _ in range(request["count"]):
            start = start or time.perf_counter()
            token = next(running)
            seconds.append(time.perf_counter() - start)
            start = 0.0
            tokens.append(token.tolist())
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
