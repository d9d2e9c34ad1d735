"""Finds passwords for registries. Each password is for the host that it was configured for, and for no other.

Passwords come from the caller (`Login`), or from files in the format of ``docker login`` and ``podman login`` (docker/cli,
cli/config/configfile)::

    {"auths":       {HOST: {"auth": base64 of "user:password"}},
     "credHelpers": {HOST: name of a helper},
     "credsStore":  name of the helper for every host}

The helper NAME is a program ``docker-credential-NAME``: ``get`` reads a host and prints ``{"Username", "Secret"}``.
"""

from __future__ import annotations

import base64
import binascii
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotgaudi.errors import SpecError

_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io", "auth.docker.io"})
"""The four names of one registry. ``docker login`` stores its password for ``https://index.docker.io/v1/``."""
_IDENTITY_TOKEN = "<token>"  # noqa: S105 - the user name that marks an OAuth2 refresh token, which is no password
_HELPER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Login:
    """A user name and a password for the registry at `host` (``HOST[:PORT]``)."""

    host: str
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Looks up passwords in `logins`, and then in `config_files` in order. Files that do not exist are skipped.

    `token_hosts` are further hosts that may see a registry's password, because the registry's tokens come from there.
    """

    logins: tuple[Login, ...] = ()
    config_files: tuple[Path, ...] = ()
    token_hosts: frozenset[str] = frozenset()

    def basic(self, host: str) -> str | None:
        """Returns the value of the ``Authorization`` header for `host`; None if there is no password for it.

        Raises SpecError if a file cannot be read or does not have the expected format.
        """
        for login in self.logins:
            if is_same_registry(login.host, host):
                return _basic(login.user, login.password)
        return next(filter(None, (_find(path, host) for path in self.config_files)), None)

    def may_see(self, token_host: str, registry_host: str) -> bool:
        """Returns whether the password for `registry_host` may be sent to `token_host`."""
        return is_same_registry(token_host, registry_host) or token_host in self.token_hosts


NO_CREDENTIALS = Credentials()


def is_same_registry(host: str, other: str) -> bool:
    """Returns whether two hosts are the same registry: equal, or both names of Docker Hub."""
    return host == other or {host, other} <= _DOCKER_HUB


def _find(path: Path, host: str) -> str | None:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            str(path), f"cannot be read: {type(error).__name__}", "JSON as `docker login` writes it"
        ) from error
    if not isinstance(config, dict):
        raise SpecError(str(path), "is not an object", "JSON as `docker login` writes it")
    for _, entry in _entries(config, "auths", host):
        if isinstance(entry, dict) and isinstance(entry.get("auth"), str) and entry["auth"]:
            return _checked(path, entry["auth"])
    for key, helper in (*_entries(config, "credHelpers", host), (host, config.get("credsStore"))):
        found = _ask_helper(str(helper), key) if helper else None
        if found is not None:
            return found
    return None


def _entries(config: dict[str, Any], section: str, host: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a section that are for `host`. Their keys may be URLs."""
    rows = config.get(section)
    for key, value in (rows if isinstance(rows, dict) else {}).items():
        if is_same_registry(key.partition("://")[2].partition("/")[0] or key, host):
            yield key, value


def _checked(path: Path, auth: str) -> str:
    try:
        base64.b64decode(auth, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SpecError(str(path), "has an auth that is not base64", "docker login again") from error
    return f"Basic {auth}"


def _ask_helper(name: str, key: str) -> str | None:
    """Returns the password of `key` from a helper program; None if there is no such program, or it has no password."""
    try:
        done = subprocess.run(
            [f"docker-credential-{name}", "get"],
            input=key.encode(),
            capture_output=True,
            check=True,
            timeout=_HELPER_SECONDS,
        )
        answer = json.loads(done.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
    return None if user == _IDENTITY_TOKEN else _basic(user, secret)


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
