"""``aotgaudi serve``: a bundle and a model directory, over the OpenAI API."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import Acceptance
from aotgaudi.cli.options.acceptance import acceptance_options
from aotgaudi.cli.options.common import Command, available_cores, store_option
from aotgaudi.errors import SpecError
from aotgaudi.remotes.hub import fetch_model, is_hub_id


def _address_options(function: Command) -> Command:
    """``--host`` and ``--port``; the command gets them as one argument `address`."""

    @functools.wraps(function)
    def command(*, host: str, port: int, **others: Any) -> Any:
        return function(address=(host, port), **others)

    host_option = click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
    port_option = click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="Port (0: any free one).",
    )
    return host_option(port_option(command))


@click.command()
@click.option(
    "--bundle", type=click.Path(path_type=Path), required=True, metavar="DIR", help="What `build` sealed."
)
@click.option(
    "--model", required=True, metavar="DIR", help="Model directory (or hub id): config, weights, tokenizer."
)
@click.option(
    "--require-warm", is_flag=True, help="Refuse to start unless every entry is warm; never compile."
)
@_address_options
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name in the API (repeatable)  [default: the directory's name]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of matrix products  [default: $OMP_NUM_THREADS or one a core]",
)
@acceptance_options
@store_option
def serve(
    bundle: Path,
    model: str,
    require_warm: bool,
    address: tuple[str, int],
    names: tuple[str, ...],
    threads: int | None,
    acceptance: Acceptance,
    store_root: Path,
) -> None:
    """Serve a model from a verified BUNDLE. With --require-warm it starts warm or not at all."""
    from aotgaudi.server.launch import launch
    from aotgaudi.server.options import ServeOptions

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    _bound_spinning()
    model_dir = find_model(model)
    launch(
        ServeOptions(
            bundle=bundle,
            acceptance=acceptance,
            model_dir=model_dir,
            require_warm=require_warm,
            host=address[0],
            port=address[1],
            served_model_names=names or (_served_name(model, model_dir),),
            num_threads=threads or _threads(),
            store_root=store_root,
            environment=os.environ,
        )
    )


def find_model(model: str) -> Path:
    """Returns a model directory: the path itself, or a snapshot of a hub id. Raises SpecError and RemoteError."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists() or not is_hub_id(model):
        raise SpecError(
            model, "is not a model directory", "a directory with config.json and safetensors, or a hub id"
        )
    return fetch_model(model, ["*.json", "*.safetensors", "*.jinja"])


def _served_name(model: str, model_dir: Path) -> str:
    """Returns a hub id as it was given, else the directory's name as it was given."""
    if not Path(model).exists():
        return model
    return model_dir.name or model_dir.resolve().name


def _bound_spinning() -> None:
    """Bounds how long OpenMP's threads spin for work, unless the user has said so; before libgomp is loaded.

    By default they spin for so long that a second busy process on the same cores costs hundreds of
    milliseconds a step; a thousand turns cost an idle machine 2 ms of a decode step (docs/benchmarks.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _threads() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else available_cores()
