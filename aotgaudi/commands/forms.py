"""Reads a server's command out of the forms in which people keep it: a shell's script, ``docker run``, a file of flags.

Forms nest: ``docker run ... IMAGE sh -c 'exec vllm serve --config flags.yaml'``. Each step takes one form away.

Sources: docker/cli cli/command/container/opts.go and podman-run(1) for options; spf13/pflag for how they are written;
``_pull_args_from_config`` and ``load_config_file`` of vllm/utils/argparse_utils.py, release 0.32.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotgaudi.commands.env_file import parse_env_file
from aotgaudi.commands.flags import FLAGS, SHORT_FLAGS, is_looked_at, variable_effect
from aotgaudi.commands.shell import Unread, read_script, require_read
from aotgaudi.commands.starts import (
    ENGINES,
    OURSELVES,
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

LARGEST_BYTES = 1 << 20
"""The most bytes of a file of flags, variables or containers."""
_MOST_VALUES = 100_000

_READER = CommandReader({name: flag.arity for name, flag in FLAGS.items()}, SHORT_FLAGS)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_SHELL_OPTION = re.compile(r"[-+][A-Za-z]+|--(login|norc|noprofile|posix)")
_MOST_FORMS = 8

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
    arch authfile cgroup-conf cgroups conmon-pidfile creds decryption-key gidmap group-entry hostuser image-volume init-path
    os pidfile pod pod-id-file preserve-fds requires sdnotify seccomp-policy secret subgidname subuidname systemd timeout
    tz uidmap umask unsetenv variant
    """
_SWITCHES = """
    detach disable-content-trust help init interactive no-healthcheck oom-kill-disable privileged publish-all quiet
    read-only rm sig-proxy tty use-api-socket
    http-proxy no-hosts passwd read-only-tmpfs replace rmi tls-verify
    """
_SHORT = """
    a=attach c=cpu-shares d=detach e=env h=hostname i=interactive l=label m=memory p=publish P=publish-all q=quiet t=tty
    u=user v=volume w=workdir
    """


def _table(valued: str, switches: str, short: str) -> Mapping[str, tuple[str, bool]]:
    """Returns how an option is written -> its name without dashes, and whether it takes a value."""
    takes = {**dict.fromkeys(switches.split(), False), **dict.fromkeys(valued.split(), True)}
    letters = dict(pair.split("=") for pair in short.split())
    names = {f"--{name}": name for name in takes} | {f"-{letter}": name for letter, name in letters.items()}
    return {written: (name, takes[name]) for written, name in names.items()}


_RUN = _table(_VALUED, _SWITCHES, _SHORT)
"""The options of ``docker run`` 28, and of podman and nerdctl."""

_AHEAD = _table(
    "address config connection context host log-level namespace root url",
    "debug tls remote",
    "H=host c=context l=log-level n=namespace a=address D=debug",
)
"""Options that stand in front of ``run``."""

_NOT_NEGATED = (
    "aggregate-engine-logging",
    "data-parallel-multi-port-external-lb",
    "disable-log-stats",
    "grpc",
    "headless",
)
"""Switches of vLLM 0.32 without a ``--no-`` form."""


class NoServerError(SpecError):
    """The command of an image is not known, or starts no server."""


def _error(problem: str, remedy: str) -> SpecError:
    return SpecError(WHERE, problem, remedy)


def read_form(
    kept: PlainCommand,
    caller: Mapping[str, str],
    cwd: Path,
    flags: Container[str] | None = None,
    where: str = WHERE,
) -> PlainCommand:
    """Returns a command without what stands around it.

    Args:
        kept: the words as they are kept, and what is known of their container.
        caller: the environment of the caller.
        cwd: the directory of relative paths.
        flags: the flags that a file may have; None for any.
        where: the command's name in errors.

    Raises:
        SpecError: a form that is not read, or that has something that cannot be read.
    """
    given = kept.words
    for _ in range(_MOST_FORMS):
        inner = _without_form(kept, caller, cwd)
        if inner is None:
            break
        kept = inner
    require_read(kept.words, where)
    read = _with_config(kept, cwd, flags)
    return read if read.words == given else replace(read, notes=(*read.notes, f"read as {_public(read)}"))


def entered(
    image: str, entrypoint: Sequence[str] | None, arguments: Sequence[str], where: str = WHERE
) -> tuple[str, ...]:
    """Returns the command of a container. `entrypoint` is None for the image's own. Raises NoServerError."""
    if entrypoint is not None:
        return (*entrypoint, *arguments)
    first = arguments[0] if arguments else ""
    if _is_program(first):
        return tuple(arguments)
    if first.startswith("-") or "vllm" in image.lower():
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
        return read_regular(path, LARGEST_BYTES).decode()
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(str(path), f"is not UTF-8 text: {error}") from error


def read_yaml(text: str, where: str) -> list[Any]:
    """Returns the documents of a YAML file. Raises SpecError."""
    import yaml  # Only here: a plain command needs none.

    try:
        documents = list(yaml.safe_load_all(text))
        if _weight(documents, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
        return documents
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
        raise SpecError(where, f"is not YAML: {problem}") from error


def _weight(value: object, known: dict[int, int]) -> int:
    """Returns how many values there are when each alias is written out. Raises ValueError if one contains itself."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = 0
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_weight(one, known) for one in inner)
    if not known[id(value)]:
        raise ValueError("an alias contains itself")
    return known[id(value)]


def _without_form(kept: PlainCommand, caller: Mapping[str, str], cwd: Path) -> PlainCommand | None:
    """Returns the command with one form less; None if it is plain."""
    at = _form_at(kept.words)
    if at is None:
        return None
    require_read(kept.words[:at], WHERE)
    head, words = _head(kept.words[:at]), kept.words[at:]
    variables = {**kept.variables, **dict(assignments(kept.words[:at]))}
    program = _name(words[0])
    if program in ENGINES:
        return _contained(words, {**caller, **variables}, cwd)
    if program not in SHELLS:
        if "--" not in words:
            raise _error(f"{program} is given no command", f"{program} run ... -- vllm serve MODEL ...")
        return replace(kept, words=(*head, *words[words.index("--") + 1 :]), variables=variables)
    script = read_script(_script_of(words), f"the script of {program}", variables)
    leading = _leading(script.words)
    require_read(leading, WHERE)
    exported = {**variables, **script.exported, **dict(assignments(leading))}
    return replace(kept, words=(*head, *script.words[len(leading) :]), variables=exported)


def _form_at(words: Sequence[str]) -> int | None:
    """Returns the index of the program that is a form: a shell, an engine of containers or aotgaudi itself."""
    found = find_vllm(words)
    for index, word in enumerate(words[: None if found is None else found[0]]):
        is_module = word == OURSELVES and list(words[index - 1 : index]) == ["-m"]
        if is_module or _name(word) in SHELLS | ENGINES | {OURSELVES}:
            first = next((word for word in words[:index] if not any(assignments([word]))), "env")
            if _name(first) in WRAPPERS | {"sudo"} or (is_module and _PYTHON.fullmatch(_name(first))):
                return index
            if found is not None:
                remedy = f"{word} in front, or one of {', '.join(sorted(WRAPPERS))}"
                raise _error(f"begins with {shown(first)}, which may start something else", remedy)
            return None
    return None


def _leading(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the words in front that only assign: ``A=1``, ``exec``, ``env A=1``."""
    count = 0
    while words[count : count + 1] and (words[count] in ("exec", "env") or any(assignments([words[count]]))):
        count += 1
    if count and words[count - 1] == "env" and count < len(words) and words[count].startswith("-"):
        raise _error("has options of env, which change what is read here", "env NAME=VALUE ... alone")
    return tuple(words[:count])


def _head(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the wrappers in front of a form, which stay."""
    rest = words[len(_leading(words)) :]
    is_dropped = rest and (_name(rest[0]) == "sudo" or _PYTHON.fullmatch(_name(rest[0])))
    return () if is_dropped else tuple(rest)


def _script_of(words: Sequence[str]) -> str:
    """Returns the script that a shell is given with ``-c``."""
    is_script, rest = False, list(words[1:])
    while rest and rest[0] != "--" and rest[0][:1] in ("-", "+"):
        word = rest.pop(0)
        if not _SHELL_OPTION.fullmatch(word):
            raise _error(f"has {shown(word)} of {words[0]}, which is not read", f"{words[0]} -c '...'")
        is_script |= "c" in word and not word.startswith("--")
        del rest[: not word.startswith("--") and "o" in word]
    del rest[: rest[:1] == ["--"]]
    if not is_script or not rest:
        given = shown(" ".join(words[:2]))
        raise _error(f"begins with {given}: a script is not read", "the command that it runs")
    require_read(rest[:1], WHERE)
    return rest[0]


# Containers


def _contained(words: Sequence[str], caller: Mapping[str, str], cwd: Path) -> PlainCommand:
    """Returns the command of ``docker run``."""
    engine = _name(words[0])
    _, rest = _options(words[1:], _AHEAD, engine)
    verb = rest[1:2] if rest[:1] == ["container"] else rest[:1]
    if verb != ["run"]:
        asked = shown(" ".join((engine, *rest[:1])))
        raise _error(f"begins with {asked}, which is not read", f"{engine} run ... IMAGE ...")
    rest = rest[rest.index("run") + 1 :]
    options, rest = _options(rest, _RUN, f"{engine} run")
    if not rest:
        raise _error(f"{engine} run names no image", f"{engine} run ... IMAGE ...")
    require_read(rest[:1], WHERE)
    last = {name: value for name, value in options if name in ("entrypoint", "workdir")}
    require_read(last.values(), WHERE)
    entrypoint = [last["entrypoint"]] if last.get("entrypoint") else None if "entrypoint" not in last else []
    variables, notes = _variables(options, caller, cwd)
    return PlainCommand(
        words=entered(rest[0], entrypoint, rest[1:]),
        variables=variables,
        is_contained=True,
        folder=last.get("workdir", ""),
        mounts=dict(mounts(options, cwd)),
        notes=notes,
    )


def _options(
    words: Sequence[str], table: Mapping[str, tuple[str, bool]], where: str
) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the options in front, with their values, and the words after them."""
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        for written, value in _written(word, table):
            if written not in table:
                raise _error(f"{written} is no option of {where} that is known", "leave it out")
            name, takes_value = table[written]
            if takes_value and value is None and not rest:
                raise _error(f"{written} of {where} has no value", f"{written} VALUE")
            if not takes_value:
                continue
            text = rest.pop(0) if value is None else value
            if value is not None and isinstance(word, Unread):
                text = Unread(text, word.part)
            found.append((name, text))
    return found, rest


def _written(word: str, table: Mapping[str, tuple[str, bool]]) -> Iterator[tuple[str, str | None]]:
    """Yields the options in one word: ``--name``, ``--name=value``, ``-itd``, ``-eA=B``. None: the value is not in it."""
    if word.startswith("--"):
        name, is_given, value = word.partition("=")
        yield name, value if is_given else None
        return
    letters = word[1:]
    while letters:
        written, letters = f"-{letters[0]}", letters[1:]
        if table.get(written, ("", True))[1]:
            yield written, letters.removeprefix("=") or None
            return
        yield written, None


def _variables(
    options: Sequence[tuple[str, str]], caller: Mapping[str, str], cwd: Path
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the variables of a container: those of its files, then its own."""
    found: dict[str, str] = {}
    notes: list[str] = []
    for path in (value for name, value in options if name == "env-file"):
        require_read([path], WHERE)
        file = parse_env_file(read_text(cwd / path), path, caller)
        found |= file.values
        notes += file.notes
    for text in (value for name, value in options if name == "env"):
        name, is_given, value = text.partition("=")
        if isinstance(text, Unread):
            if is_needed(name):
                require_read([text], WHERE)
            notes.append(f"skipped {name}: a shell would expand {text.part}")
        elif is_given or name in caller:
            found[name] = value if is_given else caller[name]
    return found, tuple(notes)


def mounts(options: Iterable[tuple[str, str]], cwd: Path) -> Iterator[tuple[str, str]]:
    """Yields the directories of this machine that a container sees: its path, and ours."""
    for name, value in options:
        if isinstance(value, Unread):
            continue
        if name == "volume" and value.count(":"):
            source, target = value.split(":")[:2]
        elif name == "mount":
            parts = {key: text for key, _, text in (part.partition("=") for part in value.split(","))}
            source = parts.get("source", parts.get("src", ""))
            target = parts.get("target", parts.get("destination", parts.get("dst", "")))
        else:
            continue
        if source.startswith(("/", ".")) and target.startswith("/"):
            yield os.path.normpath(target), os.path.normpath(cwd / source)


def _is_program(word: str) -> bool:
    name = _name(word)
    known = SHELLS | WRAPPERS | {OURSELVES, "vllm", "sglang"}
    return name in known or _PYTHON.fullmatch(name) is not None or any(assignments([word]))


# Files of flags


def _with_config(kept: PlainCommand, cwd: Path, flags: Container[str] | None) -> PlainCommand:
    """Returns a command with the flags of its file of flags in the place where vLLM puts them."""
    found = find_vllm(kept.words)
    if found is None:
        return kept
    after = found[1]
    is_serve = kept.words[after - 1] == "serve"
    words, notes = list(kept.words[after:]), []
    for index, word in enumerate(words):
        if word.startswith("--config="):
            words[index : index + 1] = ["--config", word.partition("=")[2]]
            notes.append("vLLM 0.32 itself reads no file that is given as --config=FILE: write --config FILE")
    if "--config" not in words:
        return kept
    at = words.index("--config")
    if at == len(words) - 1 or words.count("--config") > 1:
        problem = "is given twice" if words.count("--config") > 1 else "has no value"
        raise SpecError("--config", problem, "--config FILE")
    path = words[at + 1]
    read, more = _flags_of(kept, path, cwd, flags, is_serve=is_serve)
    if is_serve:
        words = _model_first(words)
    num_ahead = 0 if words[0].startswith("-") else 1
    words = _without(words, "--config")
    words[num_ahead:num_ahead] = read
    if is_serve and "--model" not in read and not num_ahead:
        raise _error("names no model", "with --config: right after serve, or in the file")
    given = _READER.read(words).positional if is_serve and "--model" in read else ()
    if given:  # It wins over the file's model.
        ends = (at for at, word in enumerate(words) if word == given[0])
        at = next(at for at in ends if _READER.read(words[: at + 1]).positional)
        words = _without(words[:at] + words[at + 1 :], "--model")
        words.insert(0, given[0])
    return replace(kept, words=(*kept.words[:after], *words), notes=(*kept.notes, *notes, *more))


def _without(words: Sequence[str], flag: str) -> list[str]:
    at = words.index(flag)
    return [*words[:at], *words[at + 2 :]]


def _model_first(words: Sequence[str]) -> list[str]:
    """Returns the words of ``vllm serve`` with the value of ``--model`` in front, where vLLM puts it."""
    for index, word in enumerate(words):
        name, is_given, value = word.partition("=")
        if name == "--model" and (is_given or index + 1 < len(words)):
            model, after = (value, index + 1) if is_given else (words[index + 1], index + 2)
            return [model, *words[:index], *words[after:]]
    return list(words)


def _flags_of(
    kept: PlainCommand, path: str, cwd: Path, flags: Container[str] | None, *, is_serve: bool
) -> tuple[list[str], list[str]]:
    """Returns the words of a file of flags, and notes."""
    if path.rpartition(".")[2] not in ("yaml", "yml"):
        raise SpecError(path, "is no file that vLLM reads as --config", "a name that ends in .yaml or .yml")
    text = kept.files.get(os.path.normpath(path))
    if text is None:
        text = read_text(cwd / kept.on_this_machine(path))
    documents = read_yaml(text, path)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise SpecError(path, "is not one table of flags", "lines of FLAG: VALUE")
    words: list[str] = []
    unset = []
    for key, value in documents[0].items():
        name = str(key).replace("_", "-").removeprefix("no-")
        if not isinstance(key, str) or (flags is not None and name not in flags):
            remedy = "leave it out if it changes no graph"
            raise SpecError(f"{path}: {key}", "is a flag that is not known", remedy)
        if value is not False:
            words += _words_of(path, key, value)
        elif is_serve:
            unset.append(key)
        elif key in FLAGS and FLAGS[key].arity == "switch" and key not in _NOT_NEGATED:
            words.append(f"--no-{key}")
    note = f"{path}: {', '.join(unset)} has no effect: vllm serve 0.32 reads no false from a file"
    return words, [note] if unset else []


def _words_of(path: str, key: str, value: object) -> list[str]:
    if value is True:
        return [f"--{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)] if value else []
    if not isinstance(value, dict):
        return [f"--{key}", str(value)]
    try:
        return [f"--{key}", json.dumps(value)]
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: {key}", f"has no form in JSON: {error}") from error


def _public(read: PlainCommand) -> str:
    """Returns a command for people, without secrets."""
    at = (find_vllm(read.words) or (0, 0))[0]
    at -= at > 0 and read.words[at] == "-m"  # The interpreter, too.
    return shlex.join(_READER.read(read.words[at:]).public_words())


def _name(word: str) -> str:
    return word.rpartition("/")[2]
