"""``--from-vllm``: a spec from a vLLM server's command line and environment, and from options for what they leave open."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from aotgaudi.cli.options import parse_byte_count
from aotgaudi.errors import RemoteError, SpecError
from aotgaudi.share.hub import fetch_model, is_hub_id
from aotgaudi.spec.bucketing import NEWEST_RELEASE, BucketingSpec, VersionName
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.parse import json_sha256, read_bucket_file, read_config

if TYPE_CHECKING:
    from aotgaudi.wrap.from_vllm.command import VllmCommand

Command = Callable[..., Any]

_CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """The vLLM command, and the options that go with it. Options that were not given are None."""

    command: str
    env_file: Path | None
    model_config: Path | None
    spec_out: Path | None
    num_blocks: int | None
    free_memory: int | None
    bucketing_version: str | None

    @property
    def arguments(self) -> str:
        """The options as a shell would read them, without --spec-out."""
        given: Mapping[str, Any] = {
            "--from-vllm": self.command,
            "--env-file": self.env_file,
            "--model-config": self.model_config,
            "--num-blocks": self.num_blocks,
            "--free-memory": self.free_memory,
            "--bucketing-version": self.bucketing_version,
        }
        return shlex.join(
            word for name, value in given.items() if value is not None for word in (name, str(value))
        )


def from_vllm_options(function: Command) -> Command:
    """Gives a command the options of ``--from-vllm``, and passes them as `vllm`, a `VllmOptions` or None."""

    @click.option(
        "--from-vllm",
        "vllm_command",
        metavar="COMMAND",
        help='In place of SPEC: the command of a vLLM server, quoted, e.g. "vllm serve MODEL --max-num-seqs 128". Its'
        " VLLM_* and PT_HPU_* variables count as well.",
    )
    @click.option(
        "--env-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Lines of NAME=VALUE  [default: this process's environment]",
    )
    @click.option(
        "--model-config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The model's config.json  [default: MODEL's, a directory or a name on the hub]",
    )
    @click.option(
        "--spec-out",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the spec as well (.toml), and its config beside it.",
    )
    @click.option(
        "--num-blocks",
        type=click.IntRange(1, LARGEST_LIMIT),
        metavar="N",
        help="KV blocks  [default: the command's --num-gpu-blocks-override]",
    )
    @click.option(
        "--free-memory",
        metavar="SIZE",
        help="Free device memory, e.g. 92GiB, from which the KV blocks are counted as upstream counts them.",
    )
    @click.option(
        "--bucketing-version",
        type=click.Choice(get_args(VersionName)),
        metavar="VERSION",
        help=f"Your server's version, or the last one before it. The newest release is {NEWEST_RELEASE}; the default is a"
        f" later commit.  [default: {BucketingSpec().version}]",
    )
    @wraps(function)
    def command(vllm_command: str | None, **options: Any) -> Any:
        own = {name: options.pop(name) for name in _OPTION_NAMES}
        return function(vllm=_options(vllm_command, own), **options)

    return command


_OPTION_NAMES = ("env_file", "model_config", "spec_out", "num_blocks", "free_memory", "bucketing_version")


def spec_of_options(options: VllmOptions) -> BuildSpec:
    """Returns the spec of a vLLM server, written where --spec-out says, after printing the report to stderr.

    Raises:
        SpecError: see `wrap.from_vllm.spec`; or a file or the config cannot be read.
        StoreError: the spec cannot be written.
    """
    from aotgaudi.spec.write import write_spec
    from aotgaudi.wrap.from_vllm.command import (
        VllmCommand,  # Only here: the other commands need not wait for it.
    )
    from aotgaudi.wrap.from_vllm.limits import Pin
    from aotgaudi.wrap.from_vllm.spec import VllmSetup, spec_from_vllm

    command = VllmCommand.parse(options.command)
    spec, report = spec_from_vllm(
        VllmSetup(
            command=command,
            environment=_environment(options.env_file),
            config=_config(command, options.model_config),
            version=options.bucketing_version,
            pin=Pin(options.num_blocks, options.free_memory),
            read_file=lambda path: read_bucket_file(Path(path)),
            digest_file=lambda path: json_sha256(Path(path), "QUANT_CONFIG"),
        )
    )
    for line in report.lines():
        click.echo(line, err=True)
    if options.spec_out is not None:
        write_spec(options.spec_out, spec)
    return spec


def manifest_name(spec: BuildSpec) -> str:
    """Returns the name of a manifest's file after a model: ``meta-llama/Llama-3.1-8B`` is that of its last part."""
    last = re.sub(r"[^\w.-]", "_", spec.model.name.rstrip("/").rpartition("/")[2])
    return f"{last.strip('.') or 'model'}.manifest.json"


def _options(vllm_command: str | None, own: dict[str, Any]) -> VllmOptions | None:
    if vllm_command is None:
        given = [name for name, value in own.items() if value is not None]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} goes with --from-vllm COMMAND.")
        return None
    if own["spec_out"] is not None and own["spec_out"].suffix != ".toml":
        raise click.UsageError("--spec-out takes a file that ends in .toml.")
    if own["num_blocks"] is not None and own["free_memory"] is not None:
        raise click.UsageError("--num-blocks and --free-memory both pin the KV blocks: give one.")
    return VllmOptions(command=vllm_command, **{**own, "free_memory": _bytes(own["free_memory"])})


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_byte_count(text)
    except ValueError as error:
        raise SpecError("--free-memory", str(error), "such as 92GiB") from error


def _environment(env_file: Path | None) -> Mapping[str, str]:
    from aotgaudi.wrap.from_vllm.variables import parse_env_file

    if env_file is None:
        return os.environ
    try:
        return parse_env_file(env_file.read_text(encoding="utf-8"), str(env_file))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise SpecError(str(env_file), problem, "lines of NAME=VALUE") from error
    except UnicodeDecodeError as error:
        raise SpecError(str(env_file), f"is not UTF-8 text: {error.reason}", "lines of NAME=VALUE") from error


def _config(command: VllmCommand, model_config: Path | None) -> dict[str, Any]:
    if model_config is not None:
        return read_config(model_config)
    folder = _folder(command.model)
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
    """Returns the directory that a model's name stands for; None if there is no such directory."""
    try:
        folder = Path(model).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, no such user, a zero byte
        return None
