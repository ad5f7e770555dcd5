"""`bench` of a whole model: what is measured by default, what it reports, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tiny_decoders import MOST, built

from attn_export.bundle.manifest import read_manifest
from attn_export.commands.main import run
from attn_export.dialect_names import WEIGHTS
from attn_export.parts.benchmarks.bench import Measuring
from attn_export.parts.benchmarks.bundle_candidates import BundleCandidates
from attn_export.parts.benchmarks.feeds import Feed, filled
from attn_export.runtimes.run_options import Progress


def test_the_first_token_steps_and_memory_are_measured(capsys):
    options = ("--prefill", "16", "--decode", "24", "--batch", "2", "--rounds", "1")
    assert run(["bench", str(built("mistral")), *options, "--threads", "1", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    prefill, decode = report["workloads"]
    assert [prefill["name"], decode["name"]] == ["prefill, B 2, L 16", "decode, B 2, S 24"]
    assert prefill["sizes"]["logit_count"] == 1
    names = {"standard ort-cpu", "portable ort-cpu", "ort ort-cpu"}
    assert {each["name"] for each in prefill["candidates"]} == names
    assert {each["name"] for each in decode["candidates"]} == names | {"ort decode ort-cpu"}
    for workload, tokens in ((prefill, 32), (decode, 2)):
        for each in workload["candidates"]:
            assert each["outcome"] == "ran", each["reason"]
            rate = tokens / each["median_ms"] * 1e3
            assert each["tokens_per_second"] == pytest.approx(rate, rel=1e-4)
            assert each["peak_memory_bytes"] > 2**25
    assert report["left_out"] == []


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        (MOST, ([MOST], [MOST])),
        (2048, ([512], [129, 513, 2048])),
        (9999, ([512], [129, 513, 2049])),
    ],
)
def test_lengths_are_as_long_as_the_positions_of_a_model(most, lengths):
    manifest = replace(read_manifest(built("mistral")), bounds={"capacity": (1, most)})
    planned = dict(Measuring().workloads(manifest, None))
    assert [*planned] == [
        f"{name} {length}"
        for B in (1, 8)
        for name, some in zip((f"prefill, B {B}, L", f"decode, B {B}, S"), lengths, strict=True)
        for length in some
    ]
    assert all(sizes["capacity"] <= most for sizes in planned.values())


def test_an_encoder_has_prompts_alone():
    manifest = read_manifest(built("mistral"))
    inputs = {"input_ids": manifest.inputs["input_ids"]}
    encoder = replace(manifest, inputs=inputs, graphs={}, caches={}, bounds={"query_len": (1, 77)})
    planned = Measuring().workloads(encoder, None)
    assert [name for name, _ in planned] == ["prefill, B 1, L 77", "prefill, B 8, L 77"]


def test_ids_are_random_and_the_last_logits_are_wanted(tmp_path):
    bundle = built("mistral")
    manifest = read_manifest(bundle)
    (_, sizes), *_ = Measuring(prefill=(9,)).workloads(manifest, None)
    (first, *_) = BundleCandidates(bundle, tmp_path, manifest, None).candidates(sizes, decode=False)
    feeds = {name: Feed.from_json(feed) for name, feed in first.options["inputs"].items()}
    assert (filled(feeds["logit_index"], 0) == 8).all()
    ids = filled(Feed((1000,), "int64", below=feeds["input_ids"].below), 0)
    assert np.unique(ids).tolist() == list(range(64))


def test_what_no_time_is_left_for_is_said():
    manifest = read_manifest(built("mistral"))
    measuring = Measuring(prefill=(9,), seconds=-1)
    planned = [(name, sizes, ()) for name, sizes in measuring.workloads(manifest, None)]
    report = measuring.measure("m", planned, Progress())
    assert (report.workloads, report.left_out) == ((), ("prefill, B 1, L 9", "prefill, B 8, L 9"))


@pytest.mark.parametrize("option", ["--prefill", "--decode"])
def test_more_tokens_than_positions_are_one_line(option, cli):
    done = cli("bench", built("mistral"), option, "41")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "attn-export: 41 tokens are too many; the bundle takes 40\n"


def test_a_damaged_bundle_is_one_line(cli, tmp_path):
    bundle = Path(shutil.copytree(built("mistral"), tmp_path / "bundle"))
    (bundle / WEIGHTS).write_bytes(b"")
    done = cli("bench", bundle)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (7, "", 1)
    assert WEIGHTS in done.stderr
