"""Options of commands that speak with remotes, and where credentials come from."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.common import Command
from aotgaudi.oci.client import Credentials
from aotgaudi.oci.locations import LayoutPlace, NamedRemote, open_location


@dataclass(frozen=True)
class RemoteAccess:
    """How remotes are spoken to, and the name (None: the reference's tag) of the bundle there."""

    name: str | None
    allow_http: bool

    def open(self, location: str) -> NamedRemote | LayoutPlace:
        """Returns what a location means. Raises SpecError, RemoteError."""
        return open_location(location, read_credentials(), allow_http=self.allow_http)


def insecure_option(function: Command) -> Command:
    """``--insecure``."""
    return click.option(
        "--insecure",
        "allow_http",
        is_flag=True,
        help="Speak plain http with registries that are not on this machine.",
    )(function)


def remote_options(function: Command) -> Command:
    """``--name`` and ``--insecure``; the command gets them as one argument `access`."""

    @functools.wraps(function)
    def command(*, name: str | None, allow_http: bool, **others: Any) -> Any:
        return function(access=RemoteAccess(name, allow_http), **others)

    name_option = click.option(
        "--name", metavar="NAME", help="The bundle's name there  [default: the reference's tag, or latest]"
    )
    return name_option(insecure_option(command))


def read_credentials() -> Credentials:
    """Returns $ORAS_USER and $ORAS_PASS where both are set, and the files that docker and podman keep."""
    files = [Path(name) for name in (os.environ.get("REGISTRY_AUTH_FILE"),) if name]
    if folder := os.environ.get("DOCKER_CONFIG"):
        files.append(Path(folder, "config.json"))
    return Credentials(os.environ.get("ORAS_USER"), os.environ.get("ORAS_PASS"), tuple(files))
