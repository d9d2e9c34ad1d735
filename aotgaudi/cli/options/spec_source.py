"""What a command enumerates: a spec file, or the command of a vLLM server. Both are read here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.from_vllm import VllmOptions, from_vllm_options, manifest_name, spec_of_options
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec

Command = Callable[..., Any]


@dataclass(frozen=True)
class SpecSource:
    """A spec that was read. `arguments`: what named it on the command line.

    `manifest_path`: where its manifest goes by default.
    """

    spec: BuildSpec
    arguments: str
    manifest_path: Path


def spec_source(function: Command) -> Command:
    """Gives a command the arguments that name a spec, and passes it as `source`, a `SpecSource`."""

    @click.argument("spec_path", metavar="[SPEC]", required=False, type=click.Path(path_type=Path))
    @from_vllm_options
    @wraps(function)
    def command(spec_path: Path | None, vllm: VllmOptions | None, **rest: Any) -> Any:
        if vllm is not None and spec_path is not None:
            raise click.UsageError("SPEC and --from-vllm both name a spec: give one.")
        if vllm is not None and vllm.spec_out is not None and rest.get("check"):
            raise click.UsageError("--check writes nothing: leave out --spec-out.")
        return function(source=_read(spec_path) if vllm is None else _read_vllm(vllm), **rest)

    return command


def default_manifest_path(spec_path: Path) -> Path:
    """Returns where a spec's manifest lies: beside it, ``x.toml`` -> ``x.manifest.json``."""
    return spec_path.with_name(f"{spec_path.name.removesuffix('.toml')}.manifest.json")


def _read(spec_path: Path | None) -> SpecSource:
    if spec_path is None:
        raise SpecError("SPEC", "is missing", "the path of a spec (.toml), or --from-vllm COMMAND")
    return SpecSource(load_spec(spec_path), str(spec_path), default_manifest_path(spec_path))


def _read_vllm(options: VllmOptions) -> SpecSource:
    spec = spec_of_options(options)
    if options.spec_out is not None:
        return SpecSource(spec, str(options.spec_out), default_manifest_path(options.spec_out))
    return SpecSource(spec, options.arguments, Path(manifest_name(spec)))
