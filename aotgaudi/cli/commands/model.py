"""``aotgaudi model``: model directories."""

from __future__ import annotations

from pathlib import Path

import click


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
def import_(source: str, out: Path, dtype: str) -> None:
    """Write SOURCE (a directory, a .gguf file or a hub id) to DIR as config, safetensors and tokenizer."""
    from aotgaudi.build.model_import import import_model

    import_model(source, out, dtype)
    click.echo(f"model: {out}")
