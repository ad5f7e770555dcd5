"""Installation of the JavaScript runtimes: npm packages, programs of ours, Chromium.

A folder for each is made like the kit of the same name, whose modules the programs use: what is
shipped is what was tested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from attn_export.output_folder import take_place
from attn_export.runtimes.install_folder import STAMP, InstallError, digest
from attn_export.temp_folders import folder_beside, held_locks

NODE, WEB = "node", "web"
NODE_PACKAGE, WEB_PACKAGE = "onnxruntime-node", "onnxruntime-web"
LOCK = "package-lock.json"
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


def install_release(folder: Path, package: str, version: str, say: Callable[[str], None]) -> None:
    """Install another release of a package, with the program that serves it.

    Args:
        folder: Its folder.
        package: `NODE_PACKAGE` or `WEB_PACKAGE`.
        version: The release.
        say: Receives a message before each long step.

    Raises:
        InstallError: If it cannot be installed.
    """
    _check_node()
    files = _node_files() if package == NODE_PACKAGE else _web_files()
    _install(folder, files, say, {package: version})
    for other in (folder / "node_modules" / package / "bin").glob("*/*"):
        if other.name != sys.platform:  # libraries of other systems, 200 MB
            shutil.rmtree(other)


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
    own = {name: kit / name for name in ("package.json", LOCK, "src/engine.mjs")}
    return own | _shared("src") | _harness("serve.mjs")


def _web_files() -> Files:
    names = ("package.json", LOCK, "engine.mjs", "server.mjs")
    own = {name: KITS / "web" / name for name in names}
    page = ("serve_web.mjs", "browser.mjs", "harness.mjs", "harness.html")
    return own | _shared("lib") | _harness(*page)


def _shared(place: str) -> Files:
    """Return the modules that both kits share, and the frames of the programs' protocol."""
    modules = [*sorted((KITS / "js").glob("*.mjs")), HARNESS / "frames.mjs"]
    return {f"{place}/{path.name}": path for path in modules}


def _harness(*names: str) -> Files:
    return {name: HARNESS / name for name in names}


def _install(
    folder: Path,
    files: Files,
    say: Callable[[str], None],
    versions: Mapping[str, str] | None = None,
) -> None:
    """Make a new folder beside the old one, and replace the old one.

    Args:
        folder: The folder.
        files: Its files.
        say: Receives a message before each long step.
        versions: Packages of other versions than those of the lock file.
    """
    stamp = folder / STAMP
    wanted = digest(files.values())
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new:
        for place, source in files.items():
            (new / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, new / place)
        if versions:
            _bring_versions(new, folder.name, versions, say)
        else:
            _bring_packages(new, folder, say)
        (new / STAMP).write_text(wanted)
        take_place(new, folder)


def _bring_packages(new: Path, old: Path, say: Callable[[str], None]) -> None:
    """Copy the packages of the lock file from the old folder, or install them."""
    held, packages = old / LOCK, old / "node_modules"
    if packages.is_dir() and held.is_file() and held.read_bytes() == (new / LOCK).read_bytes():
        # Linked: moved packages would be gone from the old folder if this process were killed.
        shutil.copytree(packages, new / packages.name, symlinks=True, copy_function=os.link)
        return
    _npm("ci", new, old.name, say)


def _bring_versions(
    folder: Path, name: str, versions: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Install packages of the given versions, without a lock file.

    Args:
        folder: The folder of `package.json`, which is changed.
        name: The name of the folder for messages.
        versions: The versions, by package.
        say: Receives a message before each long step.
    """
    (folder / LOCK).unlink()
    path = folder / "package.json"
    package = json.loads(path.read_text(encoding="utf-8"))
    package["dependencies"] |= versions
    path.write_text(json.dumps(package, indent=2) + "\n", encoding="utf-8")
    _npm("install", folder, name, say)


def _npm(command: str, folder: Path, name: str, say: Callable[[str], None]) -> None:
    say(f"npm {command} for {name}")
    # Without scripts: that of onnxruntime-node would only fetch libraries for CUDA.
    done = subprocess.run(
        ["npm", command, "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder, capture_output=True, text=True, check=False,
        pass_fds=held_locks(),
    )  # fmt: skip
    if done.returncode:
        raise InstallError(f"npm {command} failed for {name}: {_first_error(done.stderr)}")


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
