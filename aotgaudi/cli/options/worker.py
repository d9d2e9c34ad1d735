"""Where a build's jobs run, for every command that builds: ``-j``, ``--timeout``, ``--ray``, ``--ray-store``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from aotgaudi.build.executor import Executor, MakePool, Progress
from aotgaudi.build.pool import UNIT_TIMEOUT_SECONDS
from aotgaudi.runtime.cores import available_cores
from aotgaudi.store.store import Store

Command = Callable[..., Any]


@dataclass(frozen=True)
class WorkerPlace:
    """How many workers, on this machine or on a Ray cluster. `jobs` None: one a core, or all that the cluster has."""

    jobs: int | None = None
    timeout_seconds: float = UNIT_TIMEOUT_SECONDS
    ray: str | None = None
    ray_store: str | None = None

    @property
    def num_local(self) -> int:
        """Worker processes on this machine."""
        return self.jobs or available_cores()

    def executor(
        self,
        store: Store,
        backend: str,
        should_stop: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> Executor:
        """Returns what runs plans for targets of `backend`. Raises SpecError for a place that is none."""
        return Executor(
            store,
            self.num_local,
            should_stop=should_stop,
            on_progress=on_progress,
            timeout_seconds=self.timeout_seconds,
            make_pool=None if self.ray is None else self._on_ray(self.ray, store, backend),
        )

    def _on_ray(self, address: str, store: Store, backend: str) -> MakePool:
        from aotgaudi.build.ray_pool import RayPlace, RayPool

        place = RayPlace(address, backend, self.ray_store)
        return lambda: RayPool(place, store, num_workers=self.jobs, timeout_seconds=self.timeout_seconds)


def worker_options(function: Command) -> Command:
    """Gives a command ``workers``, a `WorkerPlace`."""

    @functools.wraps(function)
    def with_workers(
        *args: Any, jobs: int | None, timeout: float, ray: str | None, ray_store: str | None, **options: Any
    ) -> Any:
        if ray_store is not None and ray is None:
            raise click.UsageError("--ray-store is for --ray ADDRESS")
        return function(*args, workers=WorkerPlace(jobs, timeout, ray, ray_store), **options)

    for option in reversed(_OPTIONS):
        with_workers = option(with_workers)
    return with_workers


_OPTIONS = (
    click.option(
        "-j",
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Worker processes  [default: one a core; with --ray, all that the cluster has]",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=UNIT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"How long a unit may take before its worker is replaced  [default: {UNIT_TIMEOUT_SECONDS:.0f}]",
    ),
    click.option(
        "--ray",
        metavar="ADDRESS",
        help="Build on this Ray cluster: HOST:PORT, auto, or local (one on this machine).",
    ),
    click.option(
        "--ray-store",
        metavar="URL",
        help="Where the nodes exchange what they build, if they do not share the store: /DIR or s3://BUCKET/PREFIX.",
    ),
)
