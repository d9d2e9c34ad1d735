"""Where a build's jobs run, for every command that builds: ``-j``, ``--timeout``, ``--ray``, ``--ray-store``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from aotgaudi.cli.options.common import FiniteRange, with_options
from aotgaudi.compile.pipeline import Workers
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS

Command = Callable[..., Any]


def worker_options(function: Command) -> Command:
    """Gives a command ``workers``, a `Workers`."""

    @functools.wraps(function)
    def with_workers(
        *args: Any, jobs: int | None, timeout: float, ray: str | None, ray_store: str | None, **options: Any
    ) -> Any:
        if ray_store is not None and ray is None:
            raise click.UsageError("--ray-store is for --ray ADDRESS")
        return function(*args, workers=Workers(jobs, timeout, ray, ray_store), **options)

    return with_options(with_workers, _OPTIONS)


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
        type=FiniteRange(min=0, min_open=True),
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
        help="Where nodes that do not share the store exchange what they build: /DIR or s3://BUCKET/PREFIX.",
    ),
)
