"""Sweeps: run the cells that a store lacks on a cluster, and store each when it is finished."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attn_export.errors import PARAGRAPH, RuntimeFailure, one_line, printable
from attn_export.parts.sweeps.cluster import DEATHS, resource, unavailable_here
from attn_export.parts.sweeps.store import Row, Store
from attn_export.parts.sweeps.sweep_plan import Cell, Source, SweepPlan, short_fields
from attn_export.parts.sweeps.tasks import CellFields, build_packed, run_packed
from attn_export.runtimes.run_options import Progress

if TYPE_CHECKING:
    from distributed import Client, Future

_PENDING: Final = 4
"""Largest number of layers in progress per worker. Workers keep a layer's bundle in memory until
all its cells have run."""

_GRACE: Final = 60.0
"""Seconds that a cell waits for a worker with its runtime, after the last such worker was lost or
while the cluster has none at all."""

_TRIES: Final = 3
"""Largest number of runs of a task that raises an error, for instance because a disk is full."""

_POLL: Final = 1.0
"""Seconds between two requests for the list of workers."""


@dataclasses.dataclass
class _LayerTask:
    """The cells of one layer in one runtime, and the task that runs them on the cluster.

    `lost` is the time since which no worker has the runtime, or None.
    """

    source: Source
    runtime: str
    dialects: tuple[str, ...]
    future: Future
    lost: float | None = None

    @property
    def cells(self) -> list[Cell]:
        return [Cell(self.source, dialect, self.runtime) for dialect in self.dialects]


Tasks = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions that workers run, with the parameters of `build_packed` and of `run_packed`."""


def run_sweep(
    plan: SweepPlan,
    store: Store,
    client: Client,
    progress: Progress | None = None,
    tasks: Tasks = (build_packed, run_packed),
) -> int:
    """Run the cells that the store does not have; return the number of these cells."""
    progress = progress or Progress()
    finished = store.finished()
    missing = [cell for cell in plan.cells if cell.id not in finished]
    progress.expect(len(missing))
    sweep = _Sweep(plan, store, client, progress, tasks)
    from distributed.comm import CommClosedError

    try:
        with client.as_current():
            sweep.run(missing)
    except (concurrent.futures.CancelledError, CommClosedError, TimeoutError) as error:
        raise RuntimeFailure(
            f"the scheduler was lost; {store.folder} has {len(store.finished())} finished cells: "
            "give --resume to run the rest"
        ) from error
    return len(missing)


class _Sweep:
    """A running sweep: its tasks on the cluster, and the bundles that they need."""

    def __init__(
        self, plan: SweepPlan, store: Store, client: Client, progress: Progress, tasks: Tasks
    ) -> None:
        self._plan, self._store, self._client = plan, store, client
        self._progress, self._started = progress, time.monotonic()
        self._build_task, self._run_task = tasks
        self._done = 0
        self._work: list[_LayerTask] = []
        self._bundles: dict[str, Future] = {}
        self._seen_resources: set[str] = set()

    def run(self, missing: Sequence[Cell]) -> None:
        """Run all cells, with at most `_PENDING` layers per worker in progress."""
        waiting = collections.deque(_by_source(missing))
        self._resources()
        while waiting or self._work:
            most = _PENDING * max(1, len(self._workers()))
            while waiting and len({work.source.key for work in self._work}) < most:
                self._submit(*waiting.popleft())
            self._collect()

    def _workers(self) -> Mapping[str, Any]:
        workers: Mapping[str, Any] = self._client.scheduler_info(n_workers=-1)["workers"]
        return workers

    def _resources(self) -> set[str]:
        """Return the resources that at least one worker has now, and remember them."""
        names = {name for worker in self._workers().values() for name in worker["resources"]}
        self._seen_resources |= names
        return names

    def _submit(self, source: Source, cells: Sequence[Cell]) -> None:
        by_runtime: dict[str, list[str]] = {}
        for cell in cells:
            by_runtime.setdefault(cell.runtime, []).append(cell.dialect)
        self._bundles[source.key] = self._client.submit(
            self._build_task, source.kind, source.content, self._plan.dialects, self._plan.seed,
            key=f"build-{source.key}", pure=False, retries=_TRIES - 1,
        )  # fmt: skip
        for runtime, dialects in by_runtime.items():
            future = self._client.submit(
                self._run_task, self._bundles[source.key], runtime, dialects,
                key=f"run-{source.key}-{runtime}", pure=False, retries=_TRIES - 1,
                resources={resource(runtime): 1},
            )  # fmt: skip
            self._work.append(_LayerTask(source, runtime, tuple(dialects), future))

    def _collect(self) -> None:
        """Wait for results, store them, and give up cells that no worker can run."""
        from distributed import wait

        try:
            wait([work.future for work in self._work], timeout=_POLL, return_when="FIRST_COMPLETED")
        except TimeoutError:
            resources = self._resources()
            for work in list(self._work):
                self._give_up_if_lost(work, resources)
        for work in [work for work in self._work if work.future.done()]:
            self._finish(work)
        in_progress = {work.source.key for work in self._work}
        for key in [key for key in self._bundles if key not in in_progress]:
            del self._bundles[key]

    def _give_up_if_lost(self, work: _LayerTask, resources: set[str]) -> None:
        if resource(work.runtime) in resources:
            work.lost = None
            return
        now = time.monotonic()
        work.lost = work.lost or now
        # Without workers, or if one had this resource before, such a worker may still connect.
        may_come_back = not resources or resource(work.runtime) in self._seen_resources
        if now - work.lost >= (_GRACE if may_come_back else 0):
            work.future.cancel()
            reason = f"no worker has {resource(work.runtime)}, which {work.runtime} takes"
            if here := unavailable_here(work.runtime):
                reason += f"; on this machine {here}"
            self._fail(work, "unavailable", reason)

    def _finish(self, work: _LayerTask) -> None:
        from distributed import KilledWorker

        error = work.future.exception()
        if error is None:
            self._end(work, work.future.result())
        elif isinstance(error, KilledWorker):
            reason = f"it ended {DEATHS} workers, the last one {str(error.last_worker)[:80]}"
            self._fail(work, "crashed", reason)
        else:
            reason = f"{type(error).__name__}: {one_line(error)[:300]}"
            self._fail(work, "error", reason)

    def _fail(self, work: _LayerTask, verdict: str, cause: str) -> None:
        failed = {"verdict": verdict, "cause": cause}
        self._end(work, dict.fromkeys(work.dialects, failed))

    def _end(self, work: _LayerTask, fields: Mapping[str, CellFields]) -> None:
        """Store the cells of a finished task."""
        source = work.source
        content = source.content
        spec = (
            printable(content, PARAGRAPH) if isinstance(content, str)
            else json.dumps(short_fields(content))
        )  # fmt: skip
        self._store.add(
            Row(
                id=cell.id, source=source.key, name=source.name, spec=spec, dtype=cell.dtype,
                dialect=cell.dialect, runtime=cell.runtime, **fields[cell.dialect],
            )
            for cell in work.cells
        )  # fmt: skip
        self._work.remove(work)
        for _ in work.cells:
            self._done += 1
            rate = self._done / max(time.monotonic() - self._started, 1e-9)
            self._progress.advance(f"{rate:.1f} cells/s")


def _by_source(cells: Iterable[Cell]) -> Iterator[tuple[Source, list[Cell]]]:
    """Yield each layer with its cells."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.source.key, []).append(cell)
    for group in grouped.values():
        yield group[0].source, group
