"""``aotgaudi model``: model directories."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.cli.options import json_option
from aotgaudi.cli.show import emit
from aotgaudi.errors import SpecError


@click.group()
def model() -> None:
    """Make a model directory that `serve` reads."""


@model.command("import")
@click.argument("source")
@click.argument("out", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
)
@click.option("--force", is_flag=True, help="Replace what is in DIR.")
@json_option("Print what was written as JSON.")
def import_(source: str, out: Path, dtype: str, force: bool, as_json: bool) -> None:
    """Write SOURCE (a directory, a .gguf file or a hub id) to DIR as config, safetensors and tokenizer."""
    from aotgaudi.compile.model_import import import_model

    import_model(source, out, dtype, overwrite=force)
    files = sorted(path.name for path in out.iterdir())
    emit({"model": str(out), "files": files}, as_json, f"model: {out}")


def find_model(model: str) -> Path:
    """Returns a model directory: the path itself, or a snapshot of a hub id. Raises SpecError and RemoteError."""
    path = Path(model)
    if path.is_dir():
        return path
    from aotgaudi.share.hub import fetch_model, is_hub_id

    if path.exists() or not is_hub_id(model):
        raise SpecError(
            model, "is not a model directory", "a directory with config.json and safetensors, or a hub id"
        )
    return fetch_model(model, ["*.json", "*.safetensors", "*.jinja"])
