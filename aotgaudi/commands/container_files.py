"""Reads a server's command out of the files that deploy it: manifests of Kubernetes, and services of Docker Compose.

Sources: kubernetes/kubernetes third_party/forked/golang/expansion for ``$(NAME)``; the references of the pod's API and of
the Compose file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aotgaudi.commands.env_file import parse_env_file
from aotgaudi.commands.forms import NoServerError, entered, is_needed, mounts, read_form, read_text, read_yaml
from aotgaudi.commands.shell import split_string
from aotgaudi.commands.starts import PlainCommand, find_vllm
from aotgaudi.errors import SpecError, shown

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<name>[A-Za-z_]\w*)"
    r"|\{(?P<braced>[A-Za-z_]\w*)(?:(?P<how>:?[-?+])(?P<word>(?:[^{}]|\{[^{}]*\})*))?\}|)",
    re.ASCII | re.DOTALL,
)
_MENTIONED = re.compile(r"\$[({]?([A-Za-z_]\w*)", re.ASCII)


class _Candidate(NamedTuple):
    """A container or a service: its name, what its image and command say, and what reads it."""

    label: str
    parts: Sequence[object]
    read: Callable[[], PlainCommand]


def read_pod(
    path: Path, container: str | None, given: Mapping[str, str], flags: Container[str] | None = None
) -> PlainCommand:
    """Returns the command of the container in a file of manifests that starts vLLM, or that is called `container`.

    Args:
        path: the file. Every pod template in it counts, whatever kind of object it belongs to.
        container: the container's name, or ``OWNER/NAME``.
        given: the values of variables that come from elsewhere: of secrets, say.
        flags: see `forms.read_form`.

    Raises:
        SpecError: names the file, or the containers among which to choose.
    """
    owners = list(_owners(read_yaml(read_text(path), str(path)), ""))
    maps = {name: one for name, one in owners if one.get("kind") == "ConfigMap"}
    found = []
    for owner, pod in owners:
        for one in _rows(pod, "containers", str(path)) if isinstance(pod.get("containers"), list) else ():
            label, parts = (
                f"{owner}/{one.get('name')}",
                (one.get("image"), one.get("command"), one.get("args")),
            )
            reading = _Pod(f"{path}: {label}", pod, one, maps, given)
            found.append(_Candidate(label, parts, _reader(reading, path.parent, flags)))
    return _chosen(str(path), found, container, "container")


def read_compose(
    path: Path, service: str | None, caller: Mapping[str, str], flags: Container[str] | None = None
) -> PlainCommand:
    """Returns the command of the service in a Compose file that starts vLLM, or that is called `service`.

    Raises:
        SpecError: names the file, or the services among which to choose.
    """
    text = read_text(path)
    file = (*read_yaml(text, str(path)), None)[0]
    if not isinstance(file, dict) or not isinstance(file.get("services"), dict):
        raise SpecError(str(path), "has no services", "a file of Docker Compose")
    if "include" in file:
        raise SpecError(str(path), "has include, which is not read", "the file that has the service")
    mentioned = frozenset(_MENTIONED.findall(text))
    environ, beside = dict(caller), path.parent / ".env"
    if beside.exists():
        ours = parse_env_file(read_text(beside), str(beside), caller, "compose", mentioned.__contains__)
        environ = {**ours.values, **caller}
    found = []
    for name in file["services"]:
        one = _table(file["services"], name, str(path))
        parts = (one.get("image"), one.get("entrypoint"), one.get("command"))
        reading = _Service(f"{path}: {name}", one, path.parent, environ, mentioned)
        found.append(_Candidate(str(name), parts, _reader(reading, path.parent, flags)))
    return _chosen(str(path), found, service, "service")


def _reader(
    reading: _Pod | _Service, folder: Path, flags: Container[str] | None
) -> Callable[[], PlainCommand]:
    return lambda: read_form(reading.command(), {}, folder, flags)


def _chosen(where: str, found: Sequence[_Candidate], name: str | None, what: str) -> PlainCommand:
    """Returns the command that is asked for, or the only one that starts vLLM. Raises SpecError."""
    labels = ", ".join(one.label for one in found) or "none"
    if name is not None:
        named = [one for one in found if name in (one.label, one.label.rpartition("/")[2])]
        if len(named) != 1:
            raise SpecError(where, f"has {len(named)} {what}s called {shown(name)}", f"one of: {labels}")
        return named[0].read()
    possible: list[tuple[_Candidate, PlainCommand | SpecError]] = []
    for one in found:
        try:
            command = one.read()
            if find_vllm(command.words):
                possible.append((one, command))
        except SpecError as error:
            if len(found) == 1 or not isinstance(error, NoServerError):
                possible.append((one, error))
    likely = [row for row in possible if "vllm" in str(row[0].parts)] or possible
    if len(likely) != 1:
        names = ", ".join(one.label for one, _ in likely)
        problem = (
            f"{len(likely)} {what}s may start vLLM: {names}"
            if likely
            else f"no {what} starts vLLM (of {labels})"
        )
        raise SpecError(where, problem, f"--{what} NAME")
    chosen = likely[0][1]
    if isinstance(chosen, SpecError):
        raise chosen
    return chosen


@dataclass
class _Pod:
    """A container of a pod template."""

    where: str
    pod: dict[str, Any]
    container: dict[str, Any]
    maps: Mapping[str, dict[str, Any]]
    given: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # Variable -> where its value is.
    notes: list[str] = field(default_factory=list)

    def command(self) -> PlainCommand:
        """Returns the command, and what the container sets for it."""
        one, where = self.container, self.where
        for source in _rows(one, "envFrom", where):
            self._take_all(source)
        for row in _rows(one, "env", where):
            self._take(row)
        entrypoint = [self._expanded(word) for word in _words(one, "command", where)]
        arguments = [self._expanded(word) for word in _words(one, "args", where)]
        mounted, files = self._mounted()
        return PlainCommand(
            words=entered(str(one.get("image")), entrypoint or None, arguments, where),
            variables=self.variables,
            is_contained=True,
            folder=_text(one.get("workingDir", ""), f"{where}: workingDir"),
            mounts=mounted,
            files=files,
            notes=tuple(self.notes),
        )

    def _take(self, row: dict[str, Any]) -> None:
        name = _member(row, "name", f"{self.where}: env")
        source = _table(row, "valueFrom", self.where)
        self.unknown.pop(name, None)
        if not source:
            value = row.get("value")
            text = "" if value is None else _text(value, f"{self.where}: {name}")
            missing = [self.unknown[found] for found in _REFERENCE.findall(text) if found in self.unknown]
            if missing:
                self._miss(name, missing[0])
            else:
                self.variables[name] = self._expanded(text)
            return
        wanted = _table(source, "configMapKeyRef", self.where)
        key, data = _member(wanted, "key", self.where), self._data(wanted)
        if key in data:
            self.variables[name] = data[key]
        elif not (wanted and wanted.get("optional")):
            self._miss(name, ", ".join(map(str, source)))

    def _take_all(self, source: dict[str, Any]) -> None:
        wanted = _table(source, "configMapRef", self.where)
        name, prefix = _member(wanted, "name", self.where), _member(source, "prefix", self.where)
        if name in self.maps:
            self.variables |= {f"{prefix}{key}": text for key, text in self._data(wanted).items()}
        elif wanted and not wanted.get("optional") and not self.given:
            raise SpecError(
                self.where, f"the ConfigMap {shown(name)} is not in the file", "add it, or --env-file"
            )
        else:
            self.notes.append(f"{self.where}: skipped the variables of {', '.join(map(str, source))}")

    def _miss(self, name: str, source: str) -> None:
        """Notes a variable whose value is elsewhere. Raises SpecError if it must be known."""
        self.variables.pop(name, None)
        if name in self.given:
            self.variables[name] = self.given[name]
        elif is_needed(name):
            raise SpecError(
                f"{self.where}: {name}", f"has its value from {source}", "its value, in --env-file FILE"
            )
        else:
            self.unknown[name] = source
            self.notes.append(f"{self.where}: skipped {name}, which has its value from {source}")

    def _expanded(self, text: str) -> str:
        """Returns a text with the variables that it names as ``$(NAME)``. A name that is not set stays as it is."""

        def value(found: re.Match[str]) -> str:
            if found[1] in self.unknown:
                problem = f"has {found[0]}, whose value is from {self.unknown[found[1]]}"
                raise SpecError(self.where, problem, "its value, in --env-file FILE")
            return "$" if found[1] is None else self.variables.get(found[1], found[0])

        return _REFERENCE.sub(value, text)

    def _data(self, wanted: Mapping[str, Any]) -> dict[str, str]:
        """Returns the texts of the ConfigMap that a table names; nothing if it is not in the file."""
        name = _member(wanted, "name", self.where)
        where = f"{self.where}: the ConfigMap {name}"
        found = _table(self.maps.get(name, {}), "data", where)
        return {str(key): _text(text, f"{where}: {key}") for key, text in found.items()}

    def _mounted(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the directories of this machine and the files of ConfigMaps that the container sees, by its paths."""
        volumes = {_member(one, "name", self.where): one for one in _rows(self.pod, "volumes", self.where)}
        mounted, files = {}, {}
        for mount in _rows(self.container, "volumeMounts", self.where):
            name, path, part = (_member(mount, key, self.where) for key in ("name", "mountPath", "subPath"))
            volume = volumes.get(name, {})
            host = _member(_table(volume, "hostPath", self.where), "path", self.where)
            if host:
                mounted[path] = os.path.join(host, part)
            source = _table(volume, "configMap", self.where)
            data, items = self._data(source), _rows(source, "items", self.where)
            given = {_member(one, "path", self.where): _member(one, "key", self.where) for one in items}
            for target, key in (given or {key: key for key in data}).items():
                if key in data and part in ("", target):
                    files[os.path.normpath(path if part else os.path.join(path, target))] = data[key]
        return mounted, files


@dataclass
class _Service:
    """A service of a Compose file."""

    where: str
    service: dict[str, Any]
    folder: Path
    environ: Mapping[str, str]
    mentioned: frozenset[str]
    notes: list[str] = field(default_factory=list)

    def command(self) -> PlainCommand:
        """Returns the command, and what the service sets for it."""
        if "extends" in self.service:
            raise SpecError(self.where, "has extends, which is not read", "the whole service")
        one = {name: self._interpolated(value) for name, value in self.service.items()}
        entrypoint = self._split(one.get("entrypoint"), "entrypoint")
        arguments = self._split(one.get("command"), "command") or ()
        variables = self._variables(one)
        volumes = [row for row in _list(one, "volumes", self.where) if isinstance(row, (str, dict))]
        return PlainCommand(
            words=entered(str(one.get("image")), entrypoint, arguments, self.where),
            variables=variables,
            is_contained=True,
            folder=_text(one.get("working_dir", ""), f"{self.where}: working_dir"),
            mounts=dict(mounts(map(_as_option, volumes), self.folder)),
            notes=tuple(self.notes),
        )

    def _split(self, value: object, name: str) -> tuple[str, ...] | None:
        """Returns the words of a command; None for the image's own."""
        if value is None:
            return None
        where = f"{self.where}: {name}"
        return (
            split_string(value, where) if isinstance(value, str) else _words({name: value}, name, self.where)
        )

    def _variables(self, one: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        files = one.get("env_file") or []
        for row in files if isinstance(files, list) else [files]:
            path, options = (row.get("path"), row) if isinstance(row, dict) else (row, {})
            file = self.folder / _text(path, f"{self.where}: env_file")
            if options.get("required", True) or file.exists():
                style = "docker" if options.get("format") == "raw" else "compose"
                is_read = lambda name: is_needed(name) or name in self.mentioned  # noqa: E731
                found |= parse_env_file(read_text(file), str(file), self.environ, style, is_read).values  # type: ignore[arg-type]
        own = one.get("environment") or {}
        where = f"{self.where}: environment"
        listed = (
            ()
            if isinstance(own, dict)
            else (_pair(row, where) for row in _list(one, "environment", self.where))
        )
        rows = own.items() if isinstance(own, dict) else listed
        for name, value in rows:
            if value is not None:
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                found[str(name)] = str(value) if is_number else _text(value, f"{self.where}: {name}")
            elif name in self.environ:
                found[name] = self.environ[name]
        return found

    def _interpolated(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._interpolated(one) for one in value]
        if isinstance(value, dict):
            return {name: self._interpolated(one) for name, one in value.items()}
        return _VARIABLE.sub(self._value, value) if isinstance(value, str) else value

    def _value(self, found: re.Match[str]) -> str:
        name, how, word = found["name"] or found["braced"], found["how"] or "", found["word"] or ""
        if found["dollar"]:
            return "$"
        if name is None:
            raise SpecError(
                self.where, f"has {shown(found.string)}, which Compose cannot read", "$$ for a dollar sign"
            )
        is_set = bool(self.environ.get(name)) if how.startswith(":") else name in self.environ
        if how.endswith("?") and not is_set:
            raise SpecError(self.where, f"{name} is not set", self._interpolated(word) or f"{name}=...")
        if how.endswith("+") or (how.endswith("-") and not is_set):
            return str(self._interpolated(word)) if how.endswith("-") or is_set else ""
        if not is_set and not how:
            self.notes.append(f"{self.where}: {name} is not set, and is read as nothing")
        return self.environ.get(name, "")


def _owners(value: Any, owner: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every table in a document, with the name of the object that it is in."""
    if isinstance(value, dict):
        if "kind" in value and isinstance(value.get("metadata"), dict):
            owner = str(value["metadata"].get("name"))
        yield owner, value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _owners(inner, owner)


def _table(table: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = table.get(name) or {}
    if not isinstance(value, dict):
        raise SpecError(f"{where}: {name}", "is no table", "a table")
    return value


def _rows(table: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    value = _list(table, name, where)
    if not all(isinstance(row, dict) for row in value):
        raise SpecError(f"{where}: {name}", "is no list of tables", "a list of tables")
    return value


def _words(table: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    return tuple(_text(word, f"{where}: {name}") for word in _list(table, name, where))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SpecError(where, f"has a value of type {type(value).__name__}", "a text, in quotes")
    return value


def _member(table: Mapping[str, Any], name: str, where: str) -> str:
    """Returns a text of a table; empty if it is not there."""
    return _text(table.get(name, ""), f"{where}: {name}")


def _list(table: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = table.get(name) or []
    if not isinstance(value, list):
        raise SpecError(f"{where}: {name}", "is no list", "a list")
    return value


def _pair(row: object, where: str) -> tuple[str, str | None]:
    name, is_given, value = _text(row, where).partition("=")
    return name, value if is_given else None


def _as_option(row: str | dict[str, Any]) -> tuple[str, str]:
    """Returns a volume of Compose as the option of docker that says the same."""
    if isinstance(row, str):
        return "volume", row
    return "mount", f"source={row.get('source')},target={row.get('target')}"
