"""The model directory: where it is, and which one a bundle is bound to."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.cli.options.common import Command
from aotgaudi.errors import SpecError
from aotgaudi.share.hub import fetch_model, is_hub_id


def bound_model_option(function: Command) -> Command:
    """``--model DIR``: gives a command `model`, None where it is not given."""
    return click.option(
        "--model",
        metavar="DIR",
        help="Bind the bundle to this model directory (or hub id): what signs the bundle signs its files, too.",
    )(function)


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
