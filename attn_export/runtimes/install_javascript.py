"""Installation of the JavaScript runtimes: npm packages, our own programs, and Chromium.

Each folder is laid out as the kit of the same name, because the programs use the modules of the
kits: so the tests of the runtimes also test the kits.
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
"""The source file of each file of an installation, by its path there."""


def install(
    folder: Path,
    names: Collection[str],
    say: Callable[[str], None],
    *,
    system_packages: bool = False,
) -> None:
    """Install runtimes, unless they are up to date.

    Args:
        folder: The folder of installed programs.
        names: Names out of node, wasm and webgpu.
        say: Receives a message before each long step.
        system_packages: Whether apt-get may install Chromium, as root, if there is none.

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
    """Install another release of a package, with the program of the runtime.

    Args:
        folder: The folder of the release.
        package: `NODE_PACKAGE` or `WEB_PACKAGE`.
        version: The release.
        say: Receives a message before each long step.

    Raises:
        InstallError: If it cannot be installed.
    """
    _check_node()
    files = _node_files() if package == NODE_PACKAGE else _web_files()
    _install(folder, files, say, {package: version})
    for libraries in (folder / "node_modules" / package / "bin").glob("*/*"):
        if libraries.name != sys.platform:  # 200 MB for other systems
            shutil.rmtree(libraries)


def chromium() -> str | None:
    """Return the path of the browser: `CHROME_PATH` if set, else one on PATH; None without one."""
    configured = os.environ.get("CHROME_PATH")
    paths = (shutil.which(name) for name in ([configured] if configured else BROWSERS))
    return next(filter(None, paths), None)


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
        version = json.loads(path.read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        return None
    return str(version)


def _node_files() -> Files:
    kit = KITS / "node"
    kit_files = {name: kit / name for name in ("package.json", LOCK, "src/engine.mjs")}
    return kit_files | _shared("src") | _harness("serve.mjs")


def _web_files() -> Files:
    names = ("package.json", LOCK, "engine.mjs", "server.mjs")
    kit_files = {name: KITS / "web" / name for name in names}
    page = ("serve_web.mjs", "browser.mjs", "harness.mjs", "harness.html")
    return kit_files | _shared("lib") | _harness(*page)


def _shared(subfolder: str) -> Files:
    """Return the modules that both kits share, and the module of the programs' protocol."""
    modules = [*sorted((KITS / "js").glob("*.mjs")), HARNESS / "frames.mjs"]
    return {f"{subfolder}/{path.name}": path for path in modules}


def _harness(*names: str) -> Files:
    return {name: HARNESS / name for name in names}


def _install(
    folder: Path,
    files: Files,
    say: Callable[[str], None],
    versions: Mapping[str, str] | None = None,
) -> None:
    """Install into a new folder, and replace the old folder by it, unless that is up to date.

    Args:
        folder: The folder of the installation.
        files: The files to copy.
        say: Receives a message before each long step.
        versions: The versions of packages that differ from the lock file.
    """
    stamp = folder / STAMP
    sources = digest(files.values())
    if stamp.is_file() and stamp.read_text() == sources:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new:
        for name, source in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, new / name)
        if versions:
            _install_versions(new, folder.name, versions, say)
        else:
            _install_packages(new, folder, say)
        (new / STAMP).write_text(sources)
        take_place(new, folder)


def _install_packages(new: Path, old: Path, say: Callable[[str], None]) -> None:
    """Install the packages of the lock file; take them from the old folder if it has the same."""
    old_lock, packages = old / LOCK, old / "node_modules"
    is_same = old_lock.is_file() and old_lock.read_bytes() == (new / LOCK).read_bytes()
    if packages.is_dir() and is_same:
        # Hard links, not moved files: the old folder must stay whole if this process is killed.
        shutil.copytree(packages, new / packages.name, symlinks=True, copy_function=os.link)
        return
    _npm("ci", new, old.name, say)


def _install_versions(
    folder: Path, name: str, versions: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Install packages of other versions, without a lock file.

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
    # Without scripts: that of onnxruntime-node only downloads libraries for CUDA.
    completed = subprocess.run(
        ["npm", command, "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder, capture_output=True, text=True, check=False,
        pass_fds=held_locks(),
    )  # fmt: skip
    if completed.returncode:
        raise InstallError(f"npm {command} failed for {name}: {_first_error(completed.stderr)}")


def _check_node() -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise InstallError(NODE_MISSING)
    completed = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
    version = completed.stdout.strip()
    major = version.removeprefix("v").partition(".")[0]
    if not major.isdecimal() or int(major) < OLDEST_NODE:
        raise InstallError(
            f"node is {version or 'broken'}; version {OLDEST_NODE} or newer is needed"
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
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if completed.returncode:
            error = _first_error(completed.stderr)
            raise InstallError(f"{' '.join(command)} failed: {error}; {by_hand}")


def _first_error(stderr: str) -> str:
    """Return the first line that states an error; the last lines only name a log file."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:"))]
    return (errors or lines or ["no message"])[0]
