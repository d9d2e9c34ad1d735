"""Options of commands that talk to remotes, and where credentials come from."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.common import Command
from aotgaudi.share.credentials import Credentials, Login
from aotgaudi.share.locations import NamedRemote, open_remote, registry_host
from aotgaudi.share.reference import Reference
from aotgaudi.share.registry_client import RegistryClient


@dataclass(frozen=True)
class RemoteAccess:
    """How remotes are reached: whether registries may use plain http, and which token services may see passwords.

    `name` is the bundle's name there (None: the reference's tag).
    """

    allow_http: bool
    token_hosts: frozenset[str]
    name: str | None = None

    def client(self, reference: Reference) -> RegistryClient:
        """Returns a client for a repository, to which $ORAS_USER and $ORAS_PASS belong."""
        credentials = read_credentials(reference.host, self.token_hosts)
        return RegistryClient(reference, credentials, allow_http=self.allow_http)

    def open(self, location: str, *others: str) -> tuple[NamedRemote, ...]:
        """Returns what the locations mean. Raises SpecError, RemoteError.

        $ORAS_USER and $ORAS_PASS belong to the registry of the first.
        """
        credentials = read_credentials(registry_host(location), self.token_hosts)
        return tuple(
            open_remote(text, credentials, allow_http=self.allow_http) for text in (location, *others)
        )


def registry_options(function: Command) -> Command:
    """``--insecure`` and ``--token-host``; the command gets them as one argument `access`."""

    @functools.wraps(function)
    def command(
        *, allow_http: bool, token_hosts: tuple[str, ...], name: str | None = None, **others: Any
    ) -> Any:
        return function(access=RemoteAccess(allow_http, frozenset(token_hosts), name), **others)

    insecure = click.option(
        "--insecure",
        "allow_http",
        is_flag=True,
        help="Use plain http even with registries that are not on this machine.",
    )
    token_host = click.option(
        "--token-host",
        "token_hosts",
        multiple=True,
        envvar="AOTGAUDI_TOKEN_HOST",
        metavar="HOST",
        help="Send a registry's password to HOST too, if the registry's tokens come from there (repeatable).",
    )
    return insecure(token_host(command))


def remote_options(function: Command) -> Command:
    """``--name``, and those of registries; the command gets them as one argument `access`."""
    name_option = click.option(
        "--name", metavar="NAME", help="The bundle's name there  [default: the reference's tag, or latest]"
    )
    return name_option(registry_options(function))


def read_credentials(host: str | None, token_hosts: Iterable[str] = ()) -> Credentials:
    """Returns where passwords come from: $ORAS_USER and $ORAS_PASS for `host` alone; files of docker and podman."""
    user, password = os.environ.get("ORAS_USER"), os.environ.get("ORAS_PASS")
    logins = (Login(host, user, password),) if host and user and password else ()
    return Credentials(logins, tuple(_config_files()), frozenset(token_hosts))


def _config_files() -> Iterator[Path]:
    if name := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(name)
    if folder := os.environ.get("DOCKER_CONFIG"):
        yield Path(folder, "config.json")
    elif home := os.environ.get("HOME"):
        yield Path(home, ".docker", "config.json")
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(folder, "containers", "auth.json")
