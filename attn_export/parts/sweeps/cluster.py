"""Dask clusters of sweeps: the resources of workers, and the addresses that may be used."""

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
from attn_export.parts.sweeps.sweep_plan import DRY_RUN, NO_DRY_RUNS
from attn_export.runtimes.catalogue import all_names, runtime, runtimes_of_parts
from attn_export.system_info import check_installed

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

DEATHS: Final = 3
"""The number of workers that a cell must crash before its verdict is ``crashed``."""

_SETTINGS: Final = {
    "distributed.scheduler.allowed-failures": DEATHS - 1,
    "distributed.worker.memory.terminate": False,  # runtimes have limits of their own
    "distributed.worker.profile.enabled": False,  # the profiler stops tasks 100 times a second
    # Dask's own threshold returns memory after each large array, which takes 10 % of a cell's time.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 27,
    "distributed.admin.log-format": "%(message)s",
}
"""Settings of Dask for the scheduler and the workers of a sweep."""

_CONNECT: Final = 15
"""Seconds until a scheduler must have answered."""


def resource(name: str) -> str:
    """Return the Dask resource that a runtime or a dry run needs, such as ``RUNTIME_node``."""
    if name.startswith(DRY_RUN):
        return "DRY_RUN"
    if name == "ort-cuda":
        return "GPU"
    base, at, cpu = name.partition("@")
    prefix, resource_name = ("CPU", cpu) if at else ("RUNTIME", base)
    return f"{prefix}_{re.sub(r'[^A-Za-z0-9]', '_', resource_name)}"


def unavailable_here(name: str) -> str:
    """Return the reason that a runtime or a dry run cannot run on this machine, or ""."""
    if not name.startswith(DRY_RUN):
        return runtime(name).unavailable()
    try:
        from attn_export.parts.cuda_dry_run.install_cuda_stand_in import not_ready
    except ModuleNotFoundError:
        return NO_DRY_RUNS
    return not_ready()


def resources_here() -> dict[str, float]:
    """Return the Dask resources of this machine. It runs one cell of each at a time."""
    known = [*all_names(), *(runtime.name for runtime, _ in runtimes_of_parts()), DRY_RUN]
    return {resource(name): 1.0 for name in known if not unavailable_here(name)}


def security(tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None) -> Security | None:
    """Return the TLS settings of this side of a connection, or None if there are no files."""
    options = {"--tls-ca": tls_ca, "--tls-cert": tls_cert, "--tls-key": tls_key}
    if not any(options.values()):
        return None
    for option, path in options.items():
        if path is None:
            raise UsageError(f"{option} is missing; TLS takes --tls-ca, --tls-cert and --tls-key")
    for option, path in options.items():
        if path is not None and not path.is_file():
            raise UsageError(f"{option} {path}: no such file")
    check_installed("distributed")
    from distributed.security import Security

    files = {
        f"tls_{side}_{part}": str(path)
        for side in ("client", "scheduler", "worker")
        for part, path in (("cert", tls_cert), ("key", tls_key))
    }
    return Security(tls_ca_file=str(tls_ca), require_encryption=True, **files)


def check_address(address: str, tls: Security | None) -> None:
    """Check that a scheduler is on this machine, or that TLS proves its identity."""
    match = re.fullmatch(r"(tcp|tls)://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})", address)
    if match is None:
        raise UsageError(
            f"the scheduler {address[:80]!r} is not an address; give tcp://HOST:PORT or tls://HOST:PORT"
        )
    scheme, host = match[1], match[2].strip("[]")
    if (scheme == "tls") != (tls is not None):
        raise UsageError(
            f"the scheduler {address}: a tls:// address takes --tls-ca, --tls-cert and --tls-key, "
            "and a tcp:// address takes none"
        )
    if tls is None and not _is_loopback(host):
        raise UsageError(
            f"the scheduler {address} is not on this machine, and Dask runs code of anybody who "
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
    """Yield a client of a scheduler, or of a cluster of processes on this machine."""
    check_installed("distributed")
    import dask
    from distributed import Client, LocalCluster

    # Dask logs errors with tracebacks, although they are raised here too. It gives both a level.
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    with dask.config.set(_SETTINGS):
        if scheduler is not None:
            check_address(scheduler, tls)
            try:
                client = Client(scheduler, security=tls, timeout=_CONNECT, set_as_default=False)
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
            # Dask warns if creating its folders takes long, as on a slow disk.
            warnings.filterwarnings("ignore", "Creating scratch directories", UserWarning)
            cluster = LocalCluster(**options)
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


def serve(scheduler: str, tls: Security | None, name: str | None) -> None:
    """Run a worker with the resources of this machine until its scheduler ends."""
    import asyncio

    check_installed("distributed")
    check_address(scheduler, tls)
    import dask
    from distributed import Nanny

    async def run() -> None:
        async with Nanny(
            scheduler, nthreads=1, resources=resources_here(), name=name, security=tls,
            death_timeout=_CONNECT,
        ) as nanny:  # fmt: skip
            await nanny.finished()

    dask.config.set(_SETTINGS)

    try:
        asyncio.run(run())
    except (OSError, TimeoutError) as error:
        raise RuntimeFailure(
            f"the scheduler {scheduler} does not answer: {one_line(error)[:120]}"
        ) from error
