"""Installation of the JavaScript runtimes: npm packages, programs of ours, Chromium.

A folder for each is made like the kit of the same name, whose modules the programs use: what is
shipped is what was tested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from attn_export.atomic_replace import take_place
from attn_export.runtimes.install_folder import STAMP, InstallError, digest
from attn_export.temp_folders import folder_beside, held_locks

NODE, WEB = "node", "web"
WEBGPU_AND_WASM = frozenset({"wasm", "webgpu"})
OLDEST_NODE = 18

NODE_MISSING = f"node is not installed; apt-get install nodejs npm ({OLDEST_NODE} or newer)"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
APT = ("apt-get", "install", "-y", "--no-install-recommends", "chromium")

RUNTIMES = Path(__file__).resolve().parent
HARNESS, KITS = RUNTIMES / "harness", RUNTIMES.parent / "kits"

Files = dict[str, Path]
"""Sources by their place in the folder where they are installed."""


def install(
    folder: Path,
    names: Collection[str],
    say: Callable[[str], None],
    *,
    system_packages: bool = False,
) -> None:
    """Install runtimes; quick where nothing has changed.

    Args:
        folder: The folder of installed programs.
        names: Of node, wasm and webgpu.
        say: Receives a message before each long step.
        system_packages: Let apt-get install Chromium, as root, where there is none.

    Raises:
        InstallError: If something is missing that must be installed by hand.
    """
    _check_node()
    if NODE in names:
        _install(folder / NODE, _node_files(), say)
    if WEBGPU_AND_WASM & set(names):
        _install(folder / WEB, _web_files(), say)
        if chromium() is None:
            _install_chromium(say, system_packages=system_packages)


def chromium() -> str | None:
    """Return the browser's program: from `CHROME_PATH`, or from the path; None without one."""
    named = os.environ.get("CHROME_PATH")
    found = (shutil.which(name) for name in ([named] if named else BROWSERS))
    return next(filter(None, found), None)


def node_sources() -> Iterable[Path]:
    """Return the source files of the program of `node`."""
    return _node_files().values()


def web_sources() -> Iterable[Path]:
    """Return the source files of the program of `wasm` and `webgpu`."""
    return _web_files().values()


def package_version(folder: Path, package: str) -> str | None:
    """Return the version of an npm package that is installed in a folder, or None.

    Args:
        folder: The folder that has `node_modules`.
        package: The name of the package.
    """
    path = folder / "node_modules" / package / "package.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        return None
    return str(found)


def _node_files() -> Files:
    kit = KITS / "node"
    own = {name: kit / name for name in ("package.json", "package-lock.json", "src/engine.mjs")}
    return own | _shared("src") | _harness("serve.mjs")


def _web_files() -> Files:
    names = ("package.json", "package-lock.json", "engine.mjs", "server.mjs")
    own = {name: KITS / "web" / name for name in names}
    page = ("serve_web.mjs", "browser.mjs", "harness.mjs", "harness.html")
    return own | _shared("lib") | _harness(*page)


def _shared(place: str) -> Files:
    """Return the modules that both kits share, and the frames of the programs' protocol."""
    modules = [*sorted((KITS / "js").glob("*.mjs")), HARNESS / "frames.mjs"]
    return {f"{place}/{path.name}": path for path in modules}


def _harness(*names: str) -> Files:
    return {name: HARNESS / name for name in names}


def _install(folder: Path, files: Files, say: Callable[[str], None]) -> None:
    """Make a new folder beside the old one, and replace the old one."""
    stamp = folder / STAMP
    wanted = digest(files.values())
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new:
        for place, source in files.items():
            (new / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, new / place)
        _bring_packages(new, folder, say)
        (new / STAMP).write_text(wanted)
        take_place(new, folder)


def _bring_packages(new: Path, old: Path, say: Callable[[str], None]) -> None:
    """Copy the packages of the lock file from the old folder, or install them."""
    lock = "package-lock.json"
    held, packages = old / lock, old / "node_modules"
    if packages.is_dir() and held.is_file() and held.read_bytes() == (new / lock).read_bytes():
        # Linked: moved packages would be gone from the old folder if this process were killed.
        shutil.copytree(packages, new / packages.name, symlinks=True, copy_function=os.link)
        return
    say(f"npm ci for {old.name}")
    # Without scripts: that of onnxruntime-node would only fetch libraries for CUDA.
    done = subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=new, capture_output=True, text=True, check=False,
        pass_fds=held_locks(),
    )  # fmt: skip
    if done.returncode:
        raise InstallError(f"npm ci failed for {old.name}: {_first_error(done.stderr)}")


def _check_node() -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise InstallError(NODE_MISSING)
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
    major = said.strip().removeprefix("v").partition(".")[0]
    if not major.isdecimal() or int(major) < OLDEST_NODE:
        raise InstallError(
            f"node is {said.strip() or 'broken'}; version {OLDEST_NODE} or newer is needed"
        )


def _install_chromium(say: Callable[[str], None], *, system_packages: bool) -> None:
    by_hand = f"there is no Chromium; run: {' '.join(APT)}, or name one in CHROME_PATH"
    if not system_packages:
        raise InstallError(f"{by_hand}, or let it be installed, as root, by --system-packages")
    if os.geteuid() != 0 or shutil.which(APT[0]) is None:
        raise InstallError(by_hand)
    say("apt-get install chromium")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (("apt-get", "update"), APT):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            why = _first_error(done.stderr)
            raise InstallError(f"{' '.join(command)} failed: {why}; {by_hand}")


def _first_error(said: str) -> str:
    """Return the first line that states an error: npm and apt end with the path of a log."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:"))]
    return (errors or lines or ["no message"])[0]
