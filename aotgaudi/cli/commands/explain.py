"""``aotgaudi explain``: why something is not warm, by the component of a key that differs. Builds and starts nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from aotgaudi.backends.base import Target
from aotgaudi.cli.options.command_words import CommandWithWords
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.options.target import planned_target_option


def _list_repairs(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    from aotgaudi.wrap.adapters.vllm.repairs import REPAIRS

    if is_asked:
        for one in REPAIRS:
            click.echo(
                f"{one.id}\n    {one.defect}\n    found by: {one.feature}\n    {one.action}\n    {one.upstream}"
            )
        context.exit()


@click.command(cls=CommandWithWords)
@click.argument("path", metavar="MANIFEST|BUNDLE", type=click.Path(path_type=Path))
@click.argument("entry_text", metavar="[ENTRY]", required=False)
@click.option(
    "--against",
    "--run",
    "against",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Compare with this bundle or receipt, not with the store; a wrapped server, with its last run at this --root.",
)
@store_options
@planned_target_option
@click.option(
    "--exit-code", is_flag=True, help="Of a wrapped server: exit with 3 or 5 if it would not be warm."
)
@click.option(
    "--repairs",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_repairs,
    help="List the defects of servers that aotgaudi mends, and exit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def explain(
    path: Path,
    entry_text: str | None,
    words: tuple[str, ...],
    against: Path | None,
    place: StorePlace,
    described: Target | None,
    exit_code: bool,
    as_json: bool,
) -> None:
    """Say why something is not warm. Exits with 0 whatever it finds.

    MANIFEST (or a spec): which component of the keys of its entries differs from what was built. ENTRY is an entry as
    printed, "(prompt, 1, 64, 0)", a pattern for such text, "(prompt, *, 64, *)", or the first digits of an id. With
    --against, what a bundle or a receipt holds is compared with what would be built here and now, or, with --target, on the
    Gaudi that FILE describes.

    BUNDLE of a wrapped server, and the server's command after --: which components of the launch differ, and which
    conditions. Without a command, the sealed one is taken. With --run, after `aotgaudi run` has refused it: what the server
    hashed there otherwise than in the build, and what it compiled.
    """
    from aotgaudi.cli.commands.explain_launch import explain_launch, is_of_launch

    code = 0
    if words or is_of_launch(path):
        document, lines, code = explain_launch(path, words, dict(os.environ), place, against)
    else:
        from aotgaudi.cli.commands.explain_programs import explain_programs

        document, lines = explain_programs(path, entry_text, against, place, described)
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(lines))
    if exit_code:
        click.get_current_context().exit(code)
