"""``aotgaudi model``: model directories."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.cli.options import json_option, path_argument
from aotgaudi.cli.show import emit


@click.group()
def model() -> None:
    """Make a model directory that `serve` reads."""


@model.command("import")
@click.argument("source")
@path_argument("out", metavar="DIR")
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
