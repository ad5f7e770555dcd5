"""Dask clusters of sweeps: what a worker has, and who may be reached."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attn_export.errors import RuntimeFailure, UsageError, one_line
from attn_export.runtimes.catalogue import CLASSES, runtime
from attn_export.runtimes.emulated_cpu import EmulatedCpu, cpus
from attn_export.runtimes.release import installed
from attn_export.sweep.sweep_plan import DRY_RUN
from attn_export.system_info import check_installed

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

DEATHS: Final = 3
"""The number of workers that a cell may end before it counts as crashed."""

SETTINGS: Final = {
    "distributed.scheduler.allowed-failures": DEATHS - 1,
    "distributed.worker.memory.terminate": False,  # runtimes have limits of their own
    "distributed.worker.profile.enabled": False,  # it stops tasks 100 times a second
    # Its own threshold returns memory after each large array: a tenth of the time of a cell.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 27,
    "distributed.admin.log-format": "%(message)s",
}
"""Dask's settings of sweeps, of the scheduler and of workers."""

CONNECT: Final = 15
"""Seconds until a scheduler must have answered."""


def resource(name: str) -> str:
    """Return the Dask resource that a runtime or a dry run takes: ``RUNTIME_node``."""
    if name.startswith(DRY_RUN):
        return "DRY_RUN"
    if name == "ort-cuda":
        return "GPU"
    base, at, cpu = name.partition("@")
    kind, rest = ("CPU", cpu) if at else ("RUNTIME", base)
    return f"{kind}_{re.sub(r'[^A-Za-z0-9]', '_', rest)}"


def unavailable_here(name: str) -> str:
    """Return the reason that a runtime or a dry run cannot run on this machine, or ""."""
    from attn_export.runtimes.install_cuda_stand_in import not_ready

    return not_ready() if name.startswith(DRY_RUN) else runtime(name).unavailable()


def resources_here() -> dict[str, float]:
    """Return what this machine can run, as Dask resources: one cell of each at a time."""
    from attn_export.runtimes.install_cuda_stand_in import not_ready

    names = [name for name in CLASSES if not runtime(name).unavailable()]
    names += [each.name for each in map(EmulatedCpu, cpus()) if not each.unavailable()]
    names += installed()
    found = {resource(name): 1.0 for name in names}
    return found if not_ready() else {**found, resource(DRY_RUN): 1.0}


def security(ca: Path | None, certificate: Path | None, key: Path | None) -> Security | None:
    """Return TLS for both sides, or None where no file is given.

    Args:
        ca: The certificate of the authority that both sides trust.
        certificate: The certificate of this side.
        key: Its key.

    Raises:
        UsageError: If some are given and some are not, or a file is missing.
    """
    given = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
    if not any(given.values()):
        return None
    for option, path in given.items():
        if path is None:
            raise UsageError(f"{option} is missing; TLS takes --tls-ca, --tls-cert and --tls-key")
    for option, path in given.items():
        if path is None or not path.is_file():
            raise UsageError(f"{option} {path}: no such file")
    check_installed("distributed")
    from distributed.security import Security

    files = {
        f"tls_{side}_{part}": str(path)
        for side in ("client", "scheduler", "worker")
        for part, path in (("cert", certificate), ("key", key))
    }
    return Security(tls_ca_file=str(ca), require_encryption=True, **files)


def check_address(address: str, tls: Security | None) -> None:
    """Check that a scheduler is on this machine, or that TLS proves who it is.

    Args:
        address: The address of the scheduler.
        tls: TLS, or None.

    Raises:
        UsageError: If it is elsewhere and there is no TLS, or the address cannot be read.
    """
    match = re.fullmatch(r"(tcp|tls)://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})", address)
    if match is None:
        raise UsageError(
            f"the scheduler {address[:80]!r} is no address; give tcp://HOST:PORT or tls://HOST:PORT"
        )
    scheme, host = match[1], match[2].strip("[]")
    if (scheme == "tls") != (tls is not None):
        raise UsageError(
            f"the scheduler {address}: a tls:// address takes --tls-ca, --tls-cert and --tls-key, "
            "and a tcp:// address takes none"
        )
    if tls is None and not _is_loopback(host):
        raise UsageError(
            f"the scheduler {address} is not on this machine, and Dask runs code of whoever "
            "reaches it; give --tls-ca, --tls-cert, --tls-key and a tls:// address"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def connected(scheduler: str | None, tls: Security | None, workers: int | None) -> Iterator[Client]:
    """Yield a client of a scheduler, or of a cluster of processes on this machine.

    Args:
        scheduler: Its address; None starts a cluster, which ends with the block.
        tls: TLS, which an address elsewhere needs.
        workers: The number of processes of a cluster. Default: the number of cores.

    Raises:
        UsageError: If the address may not be used.
        RuntimeFailure: If the scheduler does not answer.
    """
    check_installed("distributed")
    import dask
    from distributed import Client, LocalCluster

    # It logs with tracebacks what is raised here, too.
    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)

    with dask.config.set(SETTINGS):
        if scheduler is not None:
            check_address(scheduler, tls)
            try:
                client = Client(scheduler, security=tls, timeout=CONNECT, set_as_default=False)
            except (OSError, TimeoutError) as error:
                raise RuntimeFailure(
                    f"the scheduler {scheduler} does not answer: {one_line(error)[:120]}; start "
                    "it with dask scheduler, or leave --scheduler out"
                ) from error
            with client:
                yield client
            return
        options: dict[str, Any] = {
            "n_workers": workers or os.cpu_count() or 1, "threads_per_worker": 1,
            "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0",
            "resources": resources_here(), "silence_logs": "CRITICAL",
        }  # fmt: skip
        with warnings.catch_warnings():
            # On a slow disk Dask warns of it, with a line of its code.
            warnings.filterwarnings("ignore", "Creating scratch directories", UserWarning)
            cluster = LocalCluster(**options)
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


def serve(scheduler: str, tls: Security | None, name: str | None) -> None:
    """Run a worker until its scheduler ends: one cell at a time, with what this machine has.

    Args:
        scheduler: The address of the scheduler.
        tls: TLS, which an address elsewhere needs.
        name: The name of the worker. Default: its address.

    Raises:
        UsageError: If the address may not be used.
        RuntimeFailure: If the scheduler does not answer.
    """
    import asyncio

    check_installed("distributed")
    check_address(scheduler, tls)
    import dask
    from distributed import Nanny

    async def run() -> None:
        async with Nanny(
            scheduler, nthreads=1, resources=resources_here(), name=name, security=tls,
            death_timeout=CONNECT,
        ) as nanny:  # fmt: skip
            await nanny.finished()

    dask.config.set(SETTINGS)

    try:
        asyncio.run(run())
    except (OSError, TimeoutError) as error:
        raise RuntimeFailure(
            f"the scheduler {scheduler} does not answer: {one_line(error)[:120]}"
        ) from error
