"""ONNX Runtime in JavaScript: Node.js, and WebAssembly and WebGPU in headless Chromium.

An installation has npm packages and our own programs. Its folder is laid out as the kit of the same
name, because the programs use the modules of the kits: so the tests of the runtimes also test the
kits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attn_export.errors import RuntimeFailure
from attn_export.parts.installing import (
    Say,
    apt_install,
    digest,
    home,
    missing,
    new_installation,
    run_command,
    stamp_of,
)
from attn_export.parts.kits.program import ProgramRuntime
from attn_export.parts.kits.source_folders import HARNESS, KITS
from attn_export.runtimes.protocol import Runtime

# -- the installation of their programs ---------------------------------------------------------

NODE, WEB = "node", "web"
NODE_PACKAGE, WEB_PACKAGE = "onnxruntime-node", "onnxruntime-web"
LOCK = "package-lock.json"
_OLDEST_NODE = 18

_NODE_MISSING = f"node is not installed; apt-get install nodejs npm ({_OLDEST_NODE} or newer)"
_NO_CHROMIUM = "there is no Chromium; apt-get install chromium, or name one in CHROME_PATH"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
ERROR = "^(npm error|npm ERR!|E:).*"

PROGRAMS: Mapping[str, tuple[str, Sequence[str], str, Sequence[str]]] = {
    NODE_PACKAGE: ("node", ("package.json", LOCK, "src/engine.mjs"), "src", ("serve.mjs",)),
    WEB_PACKAGE: (
        "web",
        ("package.json", LOCK, "engine.mjs", "server.mjs"),
        "lib",
        ("serve_web.mjs", "browser.mjs", "harness.mjs", "harness.html"),
    ),
}
"""The sources of the program for each package: the folder of a kit and files in it, the subfolder
for the modules that all JavaScript kits share, and files in `HARNESS`."""


def install(name: str, say: Say) -> None:
    """Install a runtime, unless it is up to date."""
    _check_node()
    kind = KINDS[name]
    _install_locked(home() / kind.folder, kind.npm_package, say)
    if kind.folder == WEB and _missing_browser():
        _install_chromium(say)


def chromium() -> str | None:
    """Return the path of the browser: `CHROME_PATH` if set, else one on PATH; None without one."""
    configured = os.environ.get("CHROME_PATH")
    paths = (shutil.which(name) for name in ([configured] if configured else BROWSERS))
    return next(filter(None, paths), None)


def _missing_browser() -> str:
    """Return the reason that there is no browser, or "" if there is one."""
    if chromium() is not None:
        return ""
    path = os.environ.get("CHROME_PATH")
    return f"CHROME_PATH is {path}, which is not a program" if path else _NO_CHROMIUM


def _package_version(folder: Path, package: str) -> str | None:
    """Return the version of an npm package in the `node_modules` of a folder, or None."""
    path = folder / "node_modules" / package / "package.json"
    try:
        version = json.loads(path.read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        return None
    return str(version)


def _program_files(package: str) -> dict[str, Path]:
    """Return the source of each file of the program that uses a package, by its path there."""
    kit, names, subfolder, programs = PROGRAMS[package]
    shared = [*sorted((KITS / "js").glob("*.mjs")), HARNESS / "frames.mjs"]
    return (
        {name: KITS / kit / name for name in names}
        | {f"{subfolder}/{path.name}": path for path in shared}
        | {name: HARNESS / name for name in programs}
    )


def _install_program(folder: Path, package: str, add_packages: Callable[[Path], None]) -> None:
    """Replace an installation unless it is up to date.

    `add_packages`: A function that gets the new folder, with the program and the lock file in it.
    """
    files = _program_files(package)
    sources = digest(files.values())
    if stamp_of(folder) == sources:
        return
    with new_installation(folder, sources) as new:
        for name, source in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, new / name)
        add_packages(new)


def _install_locked(folder: Path, package: str, say: Say) -> None:
    """Install the packages of the lock file; take them from the old folder if it has the same."""
    old_lock, packages = folder / LOCK, folder / "node_modules"

    def add(new: Path) -> None:
        is_same = old_lock.is_file() and old_lock.read_bytes() == (new / LOCK).read_bytes()
        if packages.is_dir() and is_same:
            # Hard links, not moved files: the old folder must stay whole if this process is killed.
            shutil.copytree(packages, new / packages.name, symlinks=True, copy_function=os.link)
        else:
            npm("ci", new, folder.name, say)

    _install_program(folder, package, add)


def npm(command: str, folder: Path, name: str, say: Say) -> None:
    """Run a command of npm in a folder, which messages call `name`."""
    say(f"npm {command} for {name}")
    # Without scripts: that of onnxruntime-node only downloads libraries for CUDA.
    arguments = ["npm", command, "--ignore-scripts", "--no-audit", "--no-fund"]
    run_command(arguments, f"npm {command} failed for {name}", ERROR, folder)


def _check_node() -> None:
    """Raise RuntimeFailure unless Node.js and npm are here and new enough."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise RuntimeFailure(_NODE_MISSING)
    completed = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
    version = completed.stdout.strip()
    major = version.removeprefix("v").partition(".")[0]
    if not major.isdecimal() or int(major) < _OLDEST_NODE:
        raise RuntimeFailure(
            f"node is {version or 'broken'}; version {_OLDEST_NODE} or newer is needed"
        )


def _install_chromium(say: Say) -> None:
    if os.environ.get("CHROME_PATH"):
        raise RuntimeFailure(_missing_browser())
    otherwise = ", or name one in CHROME_PATH"
    apt_install(("chromium",), "there is no Chromium", say, otherwise=otherwise)


# -- the runtimes -------------------------------------------------------------------------------


class Node(ProgramRuntime):
    """The runtime `node`: onnxruntime-node."""

    name = "node"
    keeps_non_finite = True
    device = "cpu"
    measured = "1.30.0"
    npm_package, program, folder = NODE_PACKAGE, "serve.mjs", NODE

    def version(self) -> str | None:
        """Return the version of the npm package, or None."""
        return _package_version(home() / self.folder, self.npm_package)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here, or "" if it can."""
        if shutil.which("node") is None:
            return _NODE_MISSING
        return missing(self.name, self._program_file(), _program_files(self.npm_package).values())

    def command(self) -> list[str | Path]:
        """Return the command line of the program."""
        return ["node", self._program_file()]

    def install_release(self, version: str, say: Say) -> None:
        """Install a release of the package, with the program, in its folder."""
        package, folder = self.npm_package, home() / self.folder

        def add(new: Path) -> None:
            (new / LOCK).unlink()
            path = new / "package.json"
            content = json.loads(path.read_text(encoding="utf-8"))
            content["dependencies"] |= {package: version}
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            npm("install", new, folder.name, say)
            for libraries in (new / "node_modules" / package / "bin").glob("*/*"):
                if libraries.name != sys.platform:  # 200 MB for other systems
                    shutil.rmtree(libraries)

        _check_node()
        _install_program(folder, package, add)

    def _program_file(self) -> Path:
        return home() / self.folder / self.program


class _Wasm(Node):
    """The runtime `wasm`: onnxruntime-web on WebAssembly, in headless Chromium.

    Node.js runs the program that starts the browser.
    """

    name = "wasm"
    device = "browser"
    unsupported: Mapping[str, str] = {
        # Opset 24 means a cache in place. The graph for one query needs a buffer that an output
        # shares with an input, which is impossible here: see `lib/model.mjs`.
        "com.microsoft.GroupQueryAttention with opset 24": (
            "what a cache in place held before is 0 afterwards"
        ),
        "com.microsoft.MatMulNBits(accuracy_level 4)": (
            "inputs of products are not rounded to 8 bits"
        ),
    }
    npm_package, program, folder = WEB_PACKAGE, "serve_web.mjs", WEB

    def unavailable(self) -> str:
        """Return the reason that it cannot run here, or "" if it can."""
        return (_missing_browser() if shutil.which("node") else "") or super().unavailable()

    def command(self) -> list[str | Path]:
        """Return the command line of the program, which starts a browser."""
        return [*super().command(), chromium() or "chromium", self.name]


class _WebGpu(_Wasm):
    """The runtime `webgpu`: onnxruntime-web on WebGPU, in headless Chromium.

    Without a GPU, SwiftShader emulates one in software; the facts of a run state it.
    """

    name = "webgpu"
    keeps_non_finite = False
    unsupported: Mapping[str, str] = {
        "com.microsoft.MultiHeadAttention": "wrong numbers at 40 queries, seen on SwiftShader",
        "com.microsoft.GroupQueryAttention": (
            "wrong numbers for more than 32 queries without a past, seen on SwiftShader"
        ),
        "com.microsoft.MatMulNBits(accuracy_level 4)": (
            "inputs of products are not rounded to 8 bits, seen on SwiftShader"
        ),
        "value DOUBLE": "WebGPU has no float64",
    }


KINDS: Mapping[str, type[Node]] = {kind.name: kind for kind in (Node, _Wasm, _WebGpu)}


def runtimes_of(name: str) -> Sequence[Runtime]:
    """Return the runtime `node`, `wasm` or `webgpu`."""
    return [KINDS[name]()]
