"""What a machine gives: memory, as its control groups say, and open files."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export.system_info import memory_here

GROUPS = {
    "no group": ("", {}, None),
    "version 2": ("0::/a/b\n", {"a/b/memory.max": "5000"}, 5000),
    "version 2, above": ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "6000"}, 6000),
    "version 2, of a container": ("0::/\n", {"memory.max": "7000"}, 7000),
    "version 1": (
        "7:cpu,cpuacct:/x\n5:memory:/x\n", {"memory/x/memory.limit_in_bytes": "8000"}, 8000,
    ),
    "version 1, without a limit": (
        "5:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROUPS)
def test_memory_is_that_of_the_machine_or_of_its_smallest_control_group(kind: str, tmp_path: Path):
    lines, files, wanted = GROUPS[kind]
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        path = tmp_path / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    machine = memory_here(tmp_path / "nothing")
    assert machine is not None
    assert machine > 2**30
    assert memory_here(tmp_path) == (wanted or machine)


MAPS = """
import numpy
from pathlib import Path
from attn_export.tensorfile import mapped, write_tensors

arrays = {str(n): numpy.zeros(2**14, numpy.float32) for n in range(100)}
write_tensors(Path.cwd(), "input", arrays)
print(len(mapped(Path.cwd(), "input", arrays)))
"""


def test_more_arrays_are_mapped_than_files_may_be_open_by_default(tmp_path: Path):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

    done = subprocess.run(
        [sys.executable, "-c", MAPS], cwd=tmp_path, preexec_fn=few, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("100\n", "")
