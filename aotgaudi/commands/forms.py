"""Reads a server's command out of the forms in which people keep it: a shell's script, ``docker run``, a file of flags.

Forms nest: ``docker run ... IMAGE sh -c 'exec vllm serve --config flags.yaml'``. Each step takes one form away.

Sources: docker/cli cli/command/container/opts.go for options; spf13/pflag for how they are written;
``_pull_args_from_config`` and ``load_config_file`` of vllm/utils/argparse_utils.py, release 0.32.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any

from aotgaudi.commands.env_file import parse_env_file
from aotgaudi.commands.flags import FLAGS, SHORT_FLAGS, is_looked_at, variable_effect
from aotgaudi.commands.shell import Unread, read_script, require_read
from aotgaudi.commands.starts import (
    ENGINES,
    FORMS,
    SHELLS,
    WRAPPERS,
    PlainCommand,
    assignments,
    find_vllm,
)
from aotgaudi.commands.words import CommandReader
from aotgaudi.errors import SpecError, shown
from aotgaudi.files import read_regular

WHERE = "the command"

_LARGEST_BYTES = 1 << 20
_MOST_PIECES = 100_000

_READER = CommandReader({name: flag.arity for name, flag in FLAGS.items()}, SHORT_FLAGS)
_PROGRAM = re.compile("|".join((r"python[\d.]*", "vllm", "sglang", *FORMS, *WRAPPERS)))
_SHELL_OPTION = re.compile(r"--(?:login|norc|noprofile|posix)?|[-+](?P<letters>[A-Za-z]+)")
_OPTION = re.compile(
    r"--(?P<name>[^=]+)(?:=(?P<text>.*))?|-(?P<switches>[diPqt]*)(?:(?P<letter>[acehlmpuvw])(?:=?(?P<rest>.+))?)?",
    re.DOTALL,
)

_VALUED = """
    add-host annotation attach blkio-weight blkio-weight-device cap-add cap-drop cgroup-parent cgroupns cidfile cpu-count
    cpu-percent cpu-period cpu-quota cpu-rt-period cpu-rt-runtime cpu-shares cpus cpuset-cpus cpuset-mems detach-keys device
    device-cgroup-rule device-read-bps device-read-iops device-write-bps device-write-iops dns dns-opt dns-option dns-search
    domainname entrypoint env env-file expose gpus group-add health-cmd health-interval health-retries
    health-start-interval health-start-period health-timeout hostname io-maxbandwidth io-maxiops ip ip6 ipc isolation
    kernel-memory label label-file link link-local-ip log-driver log-opt mac-address memory memory-reservation memory-swap
    memory-swappiness mount name net net-alias network network-alias oom-score-adj pid pids-limit platform publish pull
    restart runtime security-opt shm-size stop-signal stop-timeout storage-opt sysctl tmpfs ulimit user userns uts volume
    volume-driver volumes-from workdir
    pod secret systemd timeout tz
    """
_SWITCHES = """
    detach disable-content-trust help init interactive no-healthcheck oom-kill-disable privileged publish-all quiet
    read-only rm sig-proxy tty use-api-socket
    replace rmi tls-verify
    """
_TAKES_VALUE = {**dict.fromkeys(_SWITCHES.split(), False), **dict.fromkeys(_VALUED.split(), True)}
"""The options of ``docker run`` 28, then usual ones of podman."""
_LETTERS = {"e": "env", "v": "volume", "w": "workdir"}
"""The short options whose values are read."""

_NOT_NEGATED = "aggregate-engine-logging data-parallel-multi-port-external-lb disable-log-stats grpc headless"
"""Switches of vLLM 0.32 without a ``--no-`` form."""


class NoServerError(SpecError):
    """The command of an image is not known, or starts no server."""


def _error(problem: str, remedy: str) -> SpecError:
    return SpecError(WHERE, problem, remedy)


def read_form(kept: PlainCommand, caller: Mapping[str, str], cwd: Path) -> PlainCommand:
    """Returns a command without what stands around it.

    Args:
        kept: the words as they are kept, and what is known of their container.
        caller: the environment of the caller.
        cwd: the directory of relative paths.

    Raises:
        SpecError: a form that is not read, or that has something that cannot be read.
    """
    given = kept.words
    while (inner := _without_form(kept, caller, cwd)) is not None:
        kept = inner
    require_read(kept.words, WHERE)
    known = {name: text for name, text in kept.variables.items() if not isinstance(text, Unread)}
    read = _with_config(replace(kept, variables=known), cwd)
    return read if read.words == given else replace(read, notes=(*read.notes, f"read as {_public(read)}"))


def entered(
    image: str, entrypoint: Sequence[str] | None, arguments: Sequence[str], where: str = WHERE
) -> tuple[str, ...]:
    """Returns the command of a container. `entrypoint` is None for the image's own. Raises NoServerError."""
    if entrypoint is not None:
        return (*entrypoint, *arguments)
    first = arguments[0] if arguments else ""
    if _PROGRAM.fullmatch(_name(first)) or any(assignments([first])):
        return tuple(arguments)
    if "vllm" in image.lower() or any(word.partition("=")[0] == "--model" for word in arguments):
        return ("vllm", "serve", *arguments)
    remedy = "give its entrypoint, or the command"
    raise NoServerError(where, f"the entrypoint of the image {shown(image)} is not known", remedy)


def is_needed(name: str) -> bool:
    """Returns whether the value of a variable must be known."""
    effect = variable_effect(name)
    return is_looked_at(name) and not (effect is not None and effect.effect == "harmless")


def read_text(path: Path) -> str:
    """Returns the text of a file that is kept with a command. Raises SpecError."""
    try:
        return read_regular(path, _LARGEST_BYTES).decode()
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(str(path), f"is not UTF-8 text: {error}") from error


def read_yaml(text: str, where: str, *, is_go: bool = False) -> list[Any]:
    """Returns the documents of a YAML file. For go-yaml 3 (`is_go`), yes, no, on and off are texts. Raises SpecError."""
    import yaml  # Only here: a plain command needs none.

    resolvers = {
        first: [row for row in rows if not (is_go and row[0].endswith(":bool")) or first in "tTfF"]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})
    try:
        documents = list(yaml.load_all(text, loader))
        written_out = json.JSONEncoder(default=str).iterencode(documents)  # With each alias.
        if next(islice(written_out, _MOST_PIECES, None), None) is not None:
            raise ValueError("its aliases stand for too many values")
        return documents
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
        raise SpecError(where, f"is not YAML: {problem}", "a template, as it is rendered") from error


def _without_form(kept: PlainCommand, caller: Mapping[str, str], cwd: Path) -> PlainCommand | None:
    """Returns the command with one form less; None if it is plain."""
    at = _form_at(kept.words)
    if at is None:
        return None
    ahead, words = kept.words[:at], kept.words[at:]
    require_read(ahead, WHERE)
    variables = {**kept.variables, **dict(assignments(ahead))}
    program, head = _name(words[0]), _unassigned(ahead)
    if head[:1] == ("sudo",):
        head = ()
    if program in ENGINES:
        return _contained(words, {**caller, **variables}, cwd)
    if program not in SHELLS:
        if "--" not in words:
            raise _error(f"{program} is given no command", f"{program} run ... -- vllm serve MODEL ...")
        return replace(kept, words=(*head, *words[words.index("--") + 1 :]), variables=variables)
    script = read_script(_script_of(words), f"the script of {program}", variables)
    inner = _unassigned(script.words)
    leading = script.words[: len(script.words) - len(inner)]
    require_read(leading, WHERE)
    exported = {**variables, **script.variables, **dict(assignments(leading))}
    return replace(kept, words=(*head, *inner), variables=exported)


def _form_at(words: Sequence[str]) -> int | None:
    """Returns the index of the program that is a form: a shell, an engine of containers or aotgaudi itself."""
    found = find_vllm(words)
    ahead = words[: None if found is None else found[0]]
    at = next((index for index, word in enumerate(ahead) if _name(word) in FORMS), None)
    first = (*_unassigned(words[:at]), "sudo")[0]
    if at is None or _name(first) in WRAPPERS | {"sudo"}:
        return at
    if found is None:
        return None
    remedy = f"{words[at]} in front, or one of {', '.join(sorted(WRAPPERS))}"
    raise _error(f"begins with {shown(first)}, which may start something else", remedy)


def _unassigned(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words without those in front that only assign: ``A=1``, ``exec``, ``env A=1``."""
    rest = tuple(dropwhile(lambda word: word in ("exec", "env") or any(assignments([word])), words))
    if rest and rest[0].startswith("-") and "env" in words[: -len(rest)]:
        raise _error("has options of env, which change what is read here", "env NAME=VALUE ... alone")
    return rest


def _script_of(words: Sequence[str]) -> str:
    """Returns the script that a shell is given with ``-c``."""
    is_script, rest = False, list(words[1:])
    while rest and (option := _SHELL_OPTION.fullmatch(rest[0])):
        letters = option["letters"] or ""
        is_script |= "c" in letters
        del rest[: 1 + ("o" in letters)]
    if not is_script or not rest:
        given = shown(" ".join(words[:2]))
        raise _error(f"begins with {given}: a script is not read", "the command that it runs")
    require_read(rest[:1], WHERE)
    return rest[0]


# Containers


def _contained(words: Sequence[str], caller: Mapping[str, str], cwd: Path) -> PlainCommand:
    """Returns the command of ``docker run``."""
    engine, rest = _name(words[0]), list(words[1:])
    del rest[: rest[:1] == ["container"]]
    if rest[:1] != ["run"]:
        asked = shown(" ".join((engine, *rest[:1])))
        raise _error(f"begins with {asked}, which is not read", f"{engine} run ... IMAGE ...")
    options, rest = _options(rest[1:], f"{engine} run")
    if not rest:
        raise _error(f"{engine} run names no image", f"{engine} run ... IMAGE ...")
    last = dict(options)
    entrypoint, folder = last.get("entrypoint"), last.get("workdir", "")
    require_read([rest[0], entrypoint or "", folder], WHERE)
    return PlainCommand(
        words=entered(rest[0], None if entrypoint is None else [entrypoint][: bool(entrypoint)], rest[1:]),
        variables=_variables(options, caller, cwd),
        is_contained=True,
        folder=folder,
        mounts=dict(mounts(options, cwd)),
    )


def _options(words: Sequence[str], where: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the options in front that have a value, by their names, and the words after all options."""
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option = _OPTION.fullmatch(word)
        name = option and (option["name"] or option["letter"])
        if option is None or (option["name"] and name not in _TAKES_VALUE):
            raise _error(f"{word.partition('=')[0]} is no option of {where} that is known", "leave it out")
        if name is None or not _TAKES_VALUE.get(name, True):
            continue
        value = option["text"] if option["name"] else option["rest"]
        if value is None and not rest:
            raise _error(f"{word} of {where} has no value", f"{word} VALUE")
        text = (
            rest.pop(0) if value is None else Unread(value, word.part) if isinstance(word, Unread) else value
        )
        found.append((_LETTERS.get(name, name), text))
    return found, rest


def _variables(options: Sequence[tuple[str, str]], caller: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """Returns the variables of a container: those of its files, then its own."""
    found: dict[str, str] = {}
    for path in (value for name, value in options if name == "env-file"):
        require_read([path], WHERE)
        found |= parse_env_file(read_text(cwd / path), path, caller).values
    for text in (value for name, value in options if name == "env"):
        name, is_given, value = text.partition("=")
        if isinstance(text, Unread):
            require_read([text] if is_needed(name) else [], WHERE)
            found[name] = Unread(value, text.part)
        elif is_given or name in caller:
            found[name] = value if is_given else caller[name]
    return found


def mounts(options: Iterable[tuple[str, str]], cwd: Path) -> Iterator[tuple[str, str]]:
    """Yields the directories of this machine that a container sees: its path, and ours."""
    for name, value in options:
        source, _, target = value.partition(":")
        if name == "mount":
            parts = dict(part.partition("=")[::2] for part in value.split(","))
            source = parts.get("source", parts.get("src", ""))
            target = parts.get("target", parts.get("destination", parts.get("dst", "")))
        is_read = name in ("volume", "mount") and not isinstance(value, Unread)
        if is_read and source.startswith(("/", ".")) and target.startswith("/"):
            yield os.path.normpath(target.partition(":")[0]), os.path.normpath(cwd / source)


# Files of flags


def _with_config(kept: PlainCommand, cwd: Path) -> PlainCommand:
    """Returns a command with the flags of its file of flags in the place where vLLM puts them."""
    found = find_vllm(kept.words)
    if found is None:
        return kept
    after, notes = found[1], list(kept.notes)
    is_serve = kept.words[after - 1] == "serve"
    words = list(kept.words[after:])
    for index, word in enumerate(words):
        if word.startswith("--config="):
            words[index : index + 1] = word.split("=", 1)
            notes.append("vLLM 0.32 itself reads no file that is given as --config=FILE: write --config FILE")
    if "--config" not in words:
        return kept
    if words.count("--config") > 1 or words[-1] == "--config":
        problem = "is given twice" if words.count("--config") > 1 else "has no value"
        raise SpecError("--config", problem, "--config FILE")
    if is_serve:
        words = _model_first(words)
    num_ahead = 0 if words[0].startswith("-") else 1
    read, more = _flags_of(kept, _cut(words, "--config"), cwd, is_serve=is_serve)
    words[num_ahead:num_ahead] = read
    if is_serve and "--model" not in read and not num_ahead:
        raise _error("names no model", "with --config: right after serve, or in the file")
    named = _READER.read(words)
    given = named.positional if is_serve and "--model" in read else ()
    if given:  # It wins over the file's model.
        ends = (at for at, word in enumerate(words) if word == given[0])
        del words[next(at for at in ends if _READER.read(words[: at + 1]).positional)]
        _cut(words, "--model")
        words.insert(0, given[0])
    elif "--model" in read and len(named.models) > 1 + len(named.positional):
        _cut(words, "--model")
    return replace(kept, words=(*kept.words[:after], *words), notes=(*notes, *more))


def _cut(words: list[str], flag: str) -> str:
    """Takes a flag and its value out of `words`, and returns the value."""
    at = words.index(flag)
    value = words[at + 1]
    del words[at : at + 2]
    return value


def _model_first(words: Sequence[str]) -> list[str]:
    """Returns the words of ``vllm serve`` with the value of ``--model`` in front, where vLLM puts it."""
    for index, word in enumerate(words):
        if word.startswith("--model="):
            return [word.partition("=")[2], *words[:index], *words[index + 1 :]]
        if word == "--model" and index + 1 < len(words):
            return [words[index + 1], *words[:index], *words[index + 2 :]]
    return list(words)


def _flags_of(kept: PlainCommand, path: str, cwd: Path, *, is_serve: bool) -> tuple[list[str], list[str]]:
    """Returns the words of a file of flags, and notes."""
    if not path.endswith((".yaml", ".yml")):
        raise SpecError(path, "is no file that vLLM reads as --config", "a name that ends in .yaml or .yml")
    documents = read_yaml(read_text(cwd / kept.on_this_machine(path)), path)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise SpecError(path, "is not one table of flags", "lines of FLAG: VALUE")
    words: list[str] = []
    unset = []
    for key, value in documents[0].items():
        if not isinstance(key, str):
            raise SpecError(f"{path}: {key}", "is no flag", "lines of FLAG: VALUE")
        if value is not False:
            words += _words_of(path, key, value)
        elif is_serve:
            unset.append(key)
        elif key in FLAGS and FLAGS[key].arity == "switch" and key not in _NOT_NEGATED.split():
            words.append(f"--no-{key}")
    note = f"{path}: {', '.join(unset)} has no effect: vllm serve 0.32 reads no false from a file"
    return words, [note] if unset else []


def _words_of(path: str, key: str, value: object) -> list[str]:
    if value is True or value == []:
        return [f"--{key}"] if value else []
    try:
        texts = (
            value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        )
    except TypeError as error:
        raise SpecError(f"{path}: {key}", f"has no form in JSON: {error}") from error
    return [f"--{key}", *map(str, texts)]


def _public(read: PlainCommand) -> str:
    """Returns a command for people, without secrets."""
    at = (find_vllm(read.words) or (0, 0))[0]
    at -= at > 0 and read.words[at] == "-m"  # The interpreter, too.
    return shlex.join(_READER.read(read.words[at:]).public_words())


def _name(word: str) -> str:
    return word.rpartition("/")[2]
