"""PyTorch's attention on the inputs of probes: `python -m attn_export.diagnose.sdpa`.

A process of its own, with the protocol of a runtime's: torch takes a second to import, and a kernel
that dies takes no one with it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.errors import one_line
from attn_export.runtimes.ipc import EventWriter, jobs_from_stdin, outcome_of, private_stdout
from attn_export.tensorfile import read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor


def main() -> None:
    """Serve the cases of one job, then end."""
    send = EventWriter(private_stdout())
    jobs = jobs_from_stdin()
    threads = int(sys.argv[1])
    try:
        import torch

        torch.set_num_threads(threads)
        send("ready")
        job = jobs.get()
        if job is None:
            return
        send("loaded", facts={"version": torch.__version__})
        for case in job["cases"]:
            _serve(case, send)
        send("done", objection="")
    except Exception as error:
        send("failed", outcome=outcome_of(error), reason=one_line(error))


def _serve(case: dict[str, Any], send: EventWriter) -> None:
    started = time.perf_counter()
    try:
        arrays = read_tensors(Path(case["inputs"]), "input", case["names"])
        output = _attention(arrays, causal=case["causal"])
    except Exception as error:
        send("case", name=case["name"], error=one_line(error))
        return
    folder = Path(case["outputs"])
    folder.mkdir(parents=True)
    write_tensors(folder, "output", {"output": output})
    send("case", name=case["name"], outputs=1, seconds=time.perf_counter() - started)


def _attention(arrays: dict[str, np.ndarray], *, causal: bool) -> np.ndarray:
    """Run `scaled_dot_product_attention` with the kernel that PyTorch chooses.

    It has no past: past keys are put before the new ones, as in every layer with a cache.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    given = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def whole(name: str) -> Tensor:
        past = given.get(f"past_{name}")
        return given[name] if past is None else torch.cat([past, given[name]], dim=2)

    with torch.inference_mode():
        output = scaled_dot_product_attention(
            given["query"], whole("key"), whole("value"), given.get("attn_mask"),
            is_causal=causal, enable_gqa=True,
        )  # fmt: skip
    array: np.ndarray = output.numpy()
    return array


if __name__ == "__main__":
    main()
