"""Reads a server's command out of the files that deploy it: manifests of Kubernetes, and services of Docker Compose.

Sources: kubernetes/kubernetes third_party/forked/golang/expansion for ``$(NAME)``; the references of the pod's API and of
the Compose file.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aotgaudi.commands.env_file import parse_env_file
from aotgaudi.commands.forms import NoServerError, entered, is_needed, mounts, read_form, read_text, read_yaml
from aotgaudi.commands.shell import Unread, require_read, split_string
from aotgaudi.commands.starts import PlainCommand, find_vllm
from aotgaudi.errors import SpecError, shown

_Value = TypeVar("_Value", bound="dict[Any, Any] | list[Any] | str")

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<name>[A-Za-z_]\w*)"
    r"|\{(?P<braced>[A-Za-z_]\w*)(?:(?P<how>:?[-?+])(?P<word>(?:[^{}]|\{[^{}]*\})*))?\}|)",
    re.ASCII | re.DOTALL,
)


def read_pod(path: Path, container: str | None, given: Mapping[str, str]) -> PlainCommand:
    """Returns the command of the container in a file of manifests that starts vLLM, or that is called `container`.

    Args:
        path: the file. Every pod template in it counts, whatever kind of object it belongs to.
        container: the container's name, or ``OWNER/NAME``.
        given: the values of variables that come from elsewhere: of secrets, say.

    Raises:
        SpecError: names the file, or the containers among which to choose.
    """
    owners = list(_owners(read_yaml(read_text(path), str(path)), ""))
    if any("modelFormat" in one and _changes_a_start(one, str(path)) for _, one in owners):
        problem = "has flags or variables that KServe adds to a runtime's"
        raise SpecError(str(path), problem, "the pod that it makes: kubectl get pod NAME -o yaml")
    maps = {name: one for name, one in owners if one.get("kind") == "ConfigMap"}
    found = [
        _Pod(f"{owner}/{one.get('name')}", one, path, given, maps)
        for owner, pod in owners
        if isinstance(pod.get("containers"), list)
        for one in _each(pod, "containers", dict, str(path))
    ]
    return _chosen(path, found, container, "container")


def read_compose(path: Path, service: str | None, caller: Mapping[str, str]) -> PlainCommand:
    """Returns the command of the service in a Compose file that starts vLLM, or that is called `service`.

    Raises:
        SpecError: names the file, or the services among which to choose.
    """
    file = (*read_yaml(read_text(path), str(path), is_go=True), None)[0]
    if not isinstance(file, dict) or not isinstance(file.get("services"), dict):
        raise SpecError(str(path), "has no services", "a file of Docker Compose")
    if "include" in file:
        raise SpecError(str(path), "has include, which is not read", "the file that has the service")
    environ, beside = dict(caller), path.parent / ".env"
    if beside.exists():
        environ = {**parse_env_file(read_text(beside), str(beside), caller, "compose").values, **caller}
    services = file["services"]
    found = [_Service(str(name), _get(services, name, dict, str(path)), path, environ) for name in services]
    return _chosen(path, found, service, "service")


def _chosen(path: Path, found: Sequence[_Kept], name: str | None, what: str) -> PlainCommand:
    """Returns the command that is asked for, or the only one that starts vLLM. Raises SpecError."""
    labels = ", ".join(one.label for one in found) or "none"
    if name is not None:
        part = re.compile("(.*/)?" + re.escape(name).replace("/", "/(.*/)?"))
        whole = [one for one in found if one.label == name]
        likely = whole or [one for one in found if part.fullmatch(one.label)]
        problem, remedy = f"has {len(likely)} {what}s called {shown(name)}", f"one of: {labels}"
    else:
        likely = [one for one in found if one.names_vllm()] or list(found)
        if len(likely) > 1:
            likely = [one for one in likely if one.may_start_vllm()]
        names = ", ".join(one.label for one in likely)
        problem, remedy = f"{len(likely)} {what}s may start vLLM: {names}", f"--{what} NAME"
        problem = problem if likely else f"no {what} starts vLLM (of {labels})"
    if len(likely) != 1:
        raise SpecError(str(path), problem, remedy)
    return likely[0].read()


@dataclass
class _Kept(ABC):
    """A container or a service: its name, its table in a file, and the variables that it may name."""

    label: str
    table: dict[str, Any]
    path: Path
    environ: Mapping[str, str]

    @property
    def where(self) -> str:
        return f"{self.path}: {self.label}"

    @abstractmethod
    def command(self) -> PlainCommand:
        """Returns the command, and what the table sets for it. Raises SpecError."""

    def read(self) -> PlainCommand:
        return read_form(self.command(), {}, self.path.parent)

    def names_vllm(self) -> bool:
        return "vllm" in str([self.table.get(name) for name in ("image", "entrypoint", "command", "args")])

    def may_start_vllm(self) -> bool:
        try:
            return find_vllm(read_form(self.command(), {}, self.path.parent).words) is not None
        except SpecError as error:
            return not isinstance(error, NoServerError)


@dataclass
class _Pod(_Kept):
    """A container of a pod template. `environ`: the variables that come from elsewhere."""

    maps: Mapping[str, dict[str, Any]]
    variables: dict[str, str] = field(default_factory=dict)

    def command(self) -> PlainCommand:
        one, where = self.table, self.where
        self.variables = {}
        for source in _each(one, "envFrom", dict, where):
            self.variables |= self._all(source)
        for row in _each(one, "env", dict, where):
            name = _get(row, "name", str, f"{where}: env")
            value = self._value(name, row)
            if isinstance(value, Unread):
                value = self.environ.get(name, value)
            if value is not None:
                self.variables[name] = _known(value, f"{where}: {name}") if is_needed(name) else value
        command, arguments = (
            [_known(self._expanded(word), where) for word in _each(one, part, str, where)]
            for part in ("command", "args")
        )
        return PlainCommand(
            words=entered(str(one.get("image")), command or None, arguments, where),
            variables=self.variables,
            is_contained=True,
            folder=_get(one, "workingDir", str, where),
        )

    def _all(self, source: dict[str, Any]) -> dict[str, str]:
        """Returns the variables of a row of envFrom; none of a secret."""
        wanted = _get(source, "configMapRef", dict, self.where)
        name, prefix = _get(wanted, "name", str, self.where), _get(source, "prefix", str, self.where)
        if wanted and name not in self.maps and not wanted.get("optional") and not self.environ:
            problem = f"the ConfigMap {shown(name)} is not in the file"
            raise SpecError(self.where, problem, "add it, or --env-file")
        return {f"{prefix}{key}": text for key, text in self._data(name).items()}

    def _value(self, name: str, row: dict[str, Any]) -> str | None:
        """Returns a variable's value, `Unread` if it is elsewhere; None if it need not be."""
        source = _get(row, "valueFrom", dict, self.where)
        if not source:
            return self._expanded(_get(row, "value", str, f"{self.where}: {name}"))
        wanted = _get(source, "configMapKeyRef", dict, self.where)
        name, key = _get(wanted, "name", str, self.where), _get(wanted, "key", str, self.where)
        found = self._data(name).get(key)
        if found is None and not wanted.get("optional"):
            return Unread("", f"its value from {', '.join(map(str, source))}")
        return found

    def _expanded(self, text: str) -> str:
        """Returns a text with the variables that it names as ``$(NAME)``. A name that is not set stays as it is."""
        for found in _REFERENCE.finditer(text):
            value = self.variables.get(found[1])
            if isinstance(value, Unread):
                return Unread(text, f"{found[0]}, which has {value.part}")
        return _REFERENCE.sub(
            lambda found: "$" if found[1] is None else self.variables.get(found[1], found[0]), text
        )

    def _data(self, name: str) -> dict[str, str]:
        """Returns the texts of a ConfigMap; nothing if it is not in the file."""
        where = f"{self.where}: the ConfigMap {name}"
        data = _get(self.maps.get(name, {}), "data", dict, where)
        return {str(key): _get(data, key, str, where) for key in data}


@dataclass
class _Service(_Kept):
    """A service of a Compose file. `environ`: the variables that Compose itself has."""

    def command(self) -> PlainCommand:
        if "extends" in self.table:
            raise SpecError(self.where, "has extends, which is not read", "the whole service")
        one = {name: self._interpolated(value) for name, value in self.table.items()}
        entrypoint = self._split(one, "entrypoint")
        rows = _get(one, "volumes", list, self.where)
        volumes = (
            f"{row.get('source')}:{row.get('target')}" if isinstance(row, dict) else row for row in rows
        )
        return PlainCommand(
            words=entered(str(one.get("image")), entrypoint, self._split(one, "command") or (), self.where),
            variables=self._variables(one),
            is_contained=True,
            folder=_get(one, "working_dir", str, self.where),
            mounts=dict(mounts((("volume", str(volume)) for volume in volumes), self.path.parent)),
        )

    def read(self) -> PlainCommand:
        found = super().read()
        self._require_set()
        return found

    def _require_set(self) -> None:
        """Raises SpecError for a variable that counts and is not set: Compose takes nothing for it, with a warning."""
        own = self.table.get("environment") or ()
        rows = own.items() if isinstance(own, dict) else (str(row).partition("=") for row in own)
        text = [row[-1] for row in rows if is_needed(str(row[0]))]
        text += [self.table.get("entrypoint"), self.table.get("command")]
        for found in _VARIABLE.finditer(str(text)):
            name = found["name"] or found["braced"]
            if name and not found["how"] and name not in self.environ:
                raise SpecError(self.where, f"{name} is not set", f"{name}=..., here or in .env")

    def _split(self, one: dict[str, Any], name: str) -> Sequence[str] | None:
        """Returns the words of a command; None for the image's own."""
        value = one.get(name)
        if isinstance(value, str):
            return split_string(value, f"{self.where}: {name}")
        return None if value is None else _each(one, name, str, self.where)

    def _variables(self, one: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        files = one.get("env_file") or []
        for row in files if isinstance(files, list) else [files]:
            options = row if isinstance(row, dict) else {"path": row}
            file = self.path.parent / _get(options, "path", str, f"{self.where}: env_file")
            if options.get("required", True) or file.exists():
                found |= parse_env_file(read_text(file), str(file), self.environ, "compose").values
        own = one.get("environment") or {}
        if not isinstance(own, dict):
            rows = [row.partition("=") for row in _each(one, "environment", str, self.where)]
            own = {name: value if is_given else None for name, is_given, value in rows}
        for name, value in own.items():
            if value is not None:
                is_plain = isinstance(value, (int, float))
                found[str(name)] = json.dumps(value) if is_plain else _get(own, name, str, self.where)
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
            problem = f"has {shown(found.string)}, which Compose cannot read"
            raise SpecError(self.where, problem, "$$ for a dollar sign")
        value = self.environ.get(name, "")
        require_read([value], f"{self.where}: {name}")
        is_set = bool(value) if how.startswith(":") else name in self.environ
        if how.endswith("?") and not is_set:
            raise SpecError(self.where, f"{name} is not set", self._interpolated(word) or f"{name}=...")
        is_replaced = how.endswith("+") if is_set else how.endswith("-")
        return str(self._interpolated(word)) if is_replaced else "" if how.endswith("+") else value


def _owners(value: Any, owner: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every table in a document, with the name of its object and the keys and names that lead to it there."""
    if isinstance(value, dict):
        if "kind" in value and isinstance(value.get("metadata"), dict):
            owner = str(value["metadata"].get("name"))
        yield owner, value
        for key, inner in value.items():
            yield from _owners(inner, owner if key in ("spec", "template") else f"{owner}/{key}")
    for inner in value if isinstance(value, list) else ():
        is_named = isinstance(inner, dict) and "name" in inner
        yield from _owners(inner, f"{owner}/{inner['name']}" if is_named else owner)


def _changes_a_start(one: dict[str, Any], where: str) -> bool:
    """Returns whether a container has words, or variables that count."""
    names = (str(row.get("name")) for row in _each(one, "env", dict, where))
    return not {"command", "args", "envFrom"}.isdisjoint(one) or any(map(is_needed, names))


def _known(text: str, where: str) -> str:
    if isinstance(text, Unread):
        raise SpecError(where, f"has {text.part}", "its value, in --env-file FILE")
    return text


def _get(table: Mapping[Any, Any], name: object, kind: type[_Value], where: str) -> _Value:
    """Returns a value of a table; an empty one if it is not there."""
    value = table.get(name)
    return kind() if value is None else _typed(value, kind, f"{where}: {name}")


def _each(table: Mapping[str, Any], name: str, kind: type[_Value], where: str) -> list[_Value]:
    """Returns the values of a list in a table."""
    return [_typed(one, kind, f"{where}: {name}") for one in _get(table, name, list, where)]


def _typed(value: object, kind: type[_Value], where: str) -> _Value:
    if not isinstance(value, kind):
        remedy = "a text, in quotes" if kind is str else "a list" if kind is list else "a table"
        raise SpecError(where, f"has a value of type {type(value).__name__}", remedy)
    return value
