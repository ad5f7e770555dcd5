"""Runs attn-export for the action: inputs from the environment, outputs into GITHUB_OUTPUT.

It ends with 0 whatever the command says, so that the reports are uploaded; the action's last step
ends with the command's code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

WRONG_USAGE = 2
JSON = "report.json"
REPORTS = {"--json": JSON, "--junit": "junit.xml", "--html": "report.html"}


def main() -> int:
    """Run the command and report how it ended."""
    folder = Path(input_of("REPORT_DIR") or "attn-export-report")
    attested, checksums = None, ""
    try:
        command = arguments(folder)
        attested = attested_bundle()
        folder.mkdir(parents=True, exist_ok=True)
        for name in REPORTS.values():  # of an earlier step: it says nothing of this run
            (folder / name).unlink(missing_ok=True)
    except (ValueError, OSError) as error:
        code = WRONG_USAGE
        annotate(str(error))
    else:
        code = run(command)
        checksums = written_checksums(attested) if attested and code == 0 else ""
    tell("checksums", checksums)
    tell("exit-code", str(code))
    tell("passed", "true" if code == 0 else "false")
    tell("report", str(folder / JSON) if (folder / JSON).is_file() else "")
    tell("upload", copied(folder))
    return 0


def arguments(folder: Path) -> list[str]:
    """Return the command that the inputs ask for, with its reports in a folder.

    Raises:
        ValueError: If they ask for none, or for two.
    """
    bundle, build, baseline = input_of("BUNDLE"), lines("BUILD"), input_of("BASELINE")
    if bool(bundle) == bool(build):
        raise ValueError("give either the input `bundle` or the input `build`")
    if build and baseline:
        raise ValueError("`baseline` is for a `bundle`: verify what was built in a step of its own")
    # Each value in one word with its option: one that begins with - is a value all the same.
    options = [f"{option}={folder / name}" for option, name in REPORTS.items()]
    options += [f"--runtime={name.strip()}" for name in lines("RUNTIMES")]
    options += [f"--require={name.strip()}" for name in lines("REQUIRE")]
    options += [f"--baseline={baseline}"] if baseline else []
    return ["build", *options, *build] if build else ["verify", *options, "--", bundle]


def attested_bundle() -> Path | None:
    """Return the folder that `build` writes and whose provenance is wanted, if it is.

    Raises:
        ValueError: If `provenance` is something else, or cannot be had here.
    """
    wanted, build = input_of("PROVENANCE"), lines("BUILD")
    if wanted in ("", "false"):
        return None
    if wanted != "true":
        raise ValueError(f"`provenance` is `true` or empty, and not {wanted!r}")
    # Of a bundle that was there before, the job knows nothing.
    named = [line.removeprefix("--output=") for line in build if line.startswith("--output=")]
    if not named:
        raise ValueError("`provenance` is for a `build` with a line --output=DIR")
    if not os.environ.get("ACTIONS_ID_TOKEN_REQUEST_URL"):
        raise ValueError("`provenance` needs `permissions: id-token: write, attestations: write`")
    return Path(named[-1])


def written_checksums(bundle: Path) -> str:
    """Write the digests of a bundle's manifest, graphs and weights; the path of the file.

    The manifest has the digests of all other files.
    """
    content = (bundle / "manifest.json").read_bytes()
    manifest = json.loads(content)
    names = {*manifest["graphs"], "weights.safetensors"}
    digests = {name: digest for name, digest in manifest["files"].items() if name in names}
    digests["manifest.json"] = hashlib.sha256(content).hexdigest()
    place = tempfile.mkdtemp(prefix="attn-export-", dir=os.environ.get("RUNNER_TEMP") or None)
    file = Path(place, "checksums.txt")
    file.write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    return str(file)


def run(command: list[str]) -> int:
    """Run attn-export; its exit code. An error that ended it becomes an annotation."""
    # -P: a folder attn_export in the workspace is not what was installed.
    words = [sys.executable, "-P", "-m", "attn_export", *command]
    last = ""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace") as child:
        assert child.stderr is not None
        for line in child.stderr:
            sys.stderr.write(line)
            last = line.strip() or last
    # A report annotates its failures itself; an error before it is one line on stderr.
    if child.returncode and last.startswith("attn-export: "):
        annotate(last.removeprefix("attn-export: "))
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def copied(folder: Path) -> str:
    """Return a folder of the runner with the reports, or "".

    What uploads them takes a pattern, and `report-dir` may hold characters that mean something.
    """
    found = [folder / name for name in REPORTS.values() if (folder / name).is_file()]
    if not found:
        return ""
    place = tempfile.mkdtemp(prefix="attn-export-", dir=os.environ.get("RUNNER_TEMP") or None)
    for file in found:
        shutil.copy(file, place)
    return place


def input_of(name: str) -> str:
    """Return an input as it is."""
    return os.environ.get(f"ACTION_{name}", "")


def lines(name: str) -> list[str]:
    """Return the lines of an input as they are, without those that are empty."""
    return [line for line in input_of(name).splitlines() if line.strip()]


def tell(name: str, value: str) -> None:
    """Set an output of the step; the value may have several lines."""
    end = uuid.uuid4().hex  # random, so that no value ends early and sets another output
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as file:
        file.write(f"{name}<<{end}\n{value}\n{end}\n")


def annotate(text: str) -> None:
    """Print an error at the top of the job's page."""
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    print(f"::error title=attn-export::{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
