"""``--from-vllm``: a spec from a vLLM server's command line and environment, and from options for what these leave open."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from aotgaudi.cli.options import option, parse_byte_count
from aotgaudi.errors import RemoteError, SpecError
from aotgaudi.share.hub import fetch_model, is_hub_id
from aotgaudi.spec.bucketing import NEWEST_RELEASE, VersionName
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.parse import json_sha256, read_bucket_file, read_config, read_text

if TYPE_CHECKING:
    from aotgaudi.commands.env_file import EnvFile
    from aotgaudi.commands.starts import PlainCommand
    from aotgaudi.from_vllm.command import VllmCommand

_CONFIG_FILE = "config.json"


def _parse_version(text: str) -> str:
    """Returns `text` if it is a `VersionName`. Raises ValueError with the names that are most like it."""
    names = get_args(VersionName)
    if text in names:
        return text
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.2) or names
    raise ValueError(
        f"{text!r} is not known; near it: {', '.join(near)} (all are in docs/how-to/write-a-spec.md)"
    )


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file of Kubernetes or Compose that has the command of a server."""

    from_vllm_pod: Path | None = option(
        "In place of COMMAND: manifests of Kubernetes (YAML) with a container that starts vLLM.",
        metavar="FILE",
    )
    from_vllm_compose: Path | None = option(
        "In place of COMMAND: a file of Docker Compose with a service that starts vLLM.", metavar="FILE"
    )
    container: str | None = option(
        "Which container or service  [default: the one that starts vLLM]",
        "--container",
        "--service",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        files = [one for one in (self.from_vllm_pod, self.from_vllm_compose) if one is not None]
        if len(files) > 1:
            raise click.UsageError("--from-vllm-pod and --from-vllm-compose: give one of them.")
        if self.container is not None and not files:
            raise click.UsageError("--container goes with --from-vllm-pod or --from-vllm-compose.")

    def read(self, given: Mapping[str, str]) -> PlainCommand | None:
        """Returns the command in the file; None if no file is given. See `commands.container_files`."""
        from aotgaudi.commands.container_files import read_compose, read_pod

        if self.from_vllm_pod is not None:
            return read_pod(self.from_vllm_pod, self.container, given)
        if self.from_vllm_compose is not None:
            return read_compose(self.from_vllm_compose, self.container, os.environ)
        return None


@dataclass(frozen=True, kw_only=True)
class VllmOptions(KeptFile):
    """The vLLM command, and the options that go with it. Options that were not given are None."""

    command: str | None = option(
        'In place of SPEC: the command of a vLLM server, quoted, e.g. "vllm serve MODEL --max-num-seqs 128", also as'
        " `docker run ...` or `sh -c '...'`. Its VLLM_* and PT_HPU_* variables count as well.",
        "--from-vllm",
        metavar="COMMAND",
    )
    env_file: Path | None = option(
        "Lines of NAME=VALUE, read as `docker run --env-file` reads them  [default: this process's environment]",
        metavar="FILE",
    )
    env_file_style: Literal["docker", "compose"] | None = option(
        "Whose rules FILE follows: compose removes quotes and comments after values.  [default: docker]",
    )
    model_config: Path | None = option(
        "The model's config.json  [default: MODEL's, a directory or a name on the hub]", metavar="FILE"
    )
    spec_out: Path | None = option(
        "Write the spec as well (.toml), and its config beside it.", metavar="FILE"
    )
    num_blocks: int | None = option(
        "KV blocks  [default: the command's --num-gpu-blocks-override]",
        type=click.IntRange(1, LARGEST_LIMIT),
        metavar="N",
    )
    free_memory: str | None = option(
        "Free device memory, e.g. 92GiB, from which the KV blocks are counted as upstream counts them.",
        metavar="SIZE",
    )
    bucketing_version: VersionName | None = option(
        f"Your server's version, or the last one before it.  [default: {NEWEST_RELEASE}, the newest release]",
        parse=_parse_version,
        metavar="VERSION",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name, value in vars(self).items() if value is not None]
        if not self.is_given and given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} goes with --from-vllm COMMAND.")
        if self.command is not None and (
            self.from_vllm_pod is not None or self.from_vllm_compose is not None
        ):
            raise click.UsageError("--from-vllm, --from-vllm-pod and --from-vllm-compose: give one of them.")
        if self.spec_out is not None and self.spec_out.suffix != ".toml":
            raise click.UsageError("--spec-out takes a file that ends in .toml.")
        if self.num_blocks is not None and self.free_memory is not None:
            raise click.UsageError("--num-blocks and --free-memory both pin the KV blocks: give one.")
        if self.env_file_style is not None and self.env_file is None:
            raise click.UsageError("--env-file-style goes with --env-file FILE.")

    @property
    def is_given(self) -> bool:
        """Whether a command is given, in any form."""
        return any(one is not None for one in (self.command, self.from_vllm_pod, self.from_vllm_compose))

    @property
    def arguments(self) -> str:
        """The options as a shell would read them, without --spec-out."""
        given = {**vars(self), "spec_out": None}
        return shlex.join(
            word
            for name, value in {"from_vllm": given.pop("command"), **given}.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        )

    def free_bytes(self) -> int | None:
        """Returns the free memory in bytes. Raises SpecError."""
        try:
            return None if self.free_memory is None else parse_byte_count(self.free_memory)
        except ValueError as error:
            raise SpecError("--free-memory", str(error), "such as 92GiB") from error


def spec_of_options(options: VllmOptions) -> BuildSpec:
    """Returns the spec of a vLLM server. Prints the report to stderr, and writes the spec if --spec-out is given.

    Raises:
        SpecError: see `from_vllm.spec`; or a file or the config cannot be read.
        StoreError: the spec cannot be written.
    """
    from aotgaudi.from_vllm.command import VllmCommand, read_kept  # Only here: others need not wait for it.
    from aotgaudi.from_vllm.limits import Pin
    from aotgaudi.from_vllm.spec import VllmSetup, spec_from_vllm
    from aotgaudi.spec.parse import write_spec

    environment = _environment(options)
    for note in environment.notes:  # Before anything in the file can be refused.
        click.echo(f"note: {note}", err=True)
    given = environment.values if options.env_file is not None else {}
    kept = options.read(given) or read_kept(options.command or "", os.environ, Path())
    command = VllmCommand.of(kept.words)
    is_alone = kept.is_contained and options.env_file is None
    spec, report = spec_from_vllm(
        VllmSetup(
            command=command,
            environment={**({} if is_alone else environment.values), **kept.variables},
            config=_config(command, options.model_config, kept),
            version=options.bucketing_version,
            pin=Pin(options.num_blocks, options.free_bytes()),
            read_file=lambda path: read_bucket_file(Path(kept.on_this_machine(path))),
            digest_file=lambda path: json_sha256(Path(kept.on_this_machine(path)), "QUANT_CONFIG"),
        )
    )
    for line in (*(f"note: {note}" for note in kept.notes), *report.lines()):
        click.echo(line, err=True)
    if options.spec_out is not None:
        write_spec(options.spec_out, spec)
    return spec


def manifest_name(spec: BuildSpec) -> str:
    """Returns the name of a manifest's file, from the last part of the model's name (``meta-llama/Llama-3.1-8B``)."""
    last = re.sub(r"[^\w.-]", "_", spec.model.name.rstrip("/").rpartition("/")[2])
    return f"{last.strip('.') or 'model'}.manifest.json"


def _environment(options: VllmOptions) -> EnvFile:
    from aotgaudi.commands.env_file import EnvFile, parse_env_file

    file = options.env_file
    if file is None:
        return EnvFile(os.environ)
    text = read_text(file, "lines of NAME=VALUE")
    return parse_env_file(text, str(file), os.environ, options.env_file_style or "docker")


def _config(command: VllmCommand, model_config: Path | None, kept: PlainCommand) -> dict[str, Any]:
    if model_config is not None:
        return read_config(model_config)
    folder = _folder(kept.on_this_machine(command.model))
    if folder is not None:
        return read_config(folder / _CONFIG_FILE)
    if not is_hub_id(command.model):
        raise SpecError(command.model, "is not a directory", "the model's directory, or --model-config FILE")
    try:
        fetched = fetch_model(command.model, [_CONFIG_FILE], command.values.get("revision"))
    except RemoteError as error:
        raise RemoteError(f"{error} (--model-config FILE)") from error
    return read_config(fetched / _CONFIG_FILE)


def _folder(model: str) -> Path | None:
    """Returns the directory that a model's name denotes; None if there is no such directory."""
    try:
        folder = Path(model).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, no such user, a zero byte
        return None
