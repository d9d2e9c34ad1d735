"""Finds where a command starts a server and which Python runs it, and asks that Python what it has installed.

The words alone say the first. Programs that set something up and then become the command (`WRAPPERS`) may precede it. What
stands around it (`aotgaudi.commands.forms`) is taken away first.

Metadata alone says the second, in 0.1 s: nothing of the server is imported. The interpreter runs a script of the standard
library (Python 3.9 and later) in isolated mode. The script names a distribution by its version and by the sha256 of its
RECORD, which lists every file with its digest, so another build of the same version is other software. Only lines of RECORD
that do not depend on the place of installation count: no console scripts (their first line names the interpreter), no
bytecode, no files of the installer. Sources that are used in place (an editable install, a checkout on ``PYTHONPATH`` or in
the working directory) are named by the content of their ``.py`` files.

We ask first, and read the answer when we need it. Meanwhile we import the rest and verify the bundle, so this module imports
almost nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from aotgaudi.commands.starts import FORMS, REMEDY, WRAPPERS, PlainCommand, assignments, find_vllm
from aotgaudi.errors import SpecError, TargetError, shown

WHERE = "the command"

FAKE_SWITCH = "AOTGAUDI_FAKE_GUEST"
"""The variable that enables the fake server."""

FAKE_SCRIPT = "fake_server.py"
SGLANG_MODULE = "sglang.launch_server"

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_EXEC_LINE = re.compile(rb"^'''exec' +(.+?) +\"\$0\"", re.MULTILINE)
_HEAD_BYTES = 4096
Indices = tuple[int, int]
"""The indices of the first word that starts a server, and of the first word after that."""


def find_sglang(words: Sequence[str]) -> Indices | None:
    """Finds ``sglang serve``, or ``python -m sglang.launch_server``."""
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else ""
        is_serve = word.rpartition("/")[2] == "sglang" and after == "serve"
        if is_serve or (word == "-m" and after == SGLANG_MODULE):
            return index, index + 2
    return None


def find_fake(words: Sequence[str]) -> Indices | None:
    """Finds ``python fake_server.py serve``."""
    for index, word in enumerate(words):
        if word.rpartition("/")[2] == FAKE_SCRIPT and list(words[index + 1 : index + 2]) == ["serve"]:
            return index, index + 2
    return None


@dataclass(frozen=True, slots=True)
class Server:
    """A kind of server that is known.

    Attributes:
        value: the module and the name of its `ServerKind`. The module is imported only when the server is needed.
        starts_at: returns where a command starts it, or None; None if commands start it as another kind's variant.
        distributions: patterns of normalised names (PEP 503) of its distributions.
        packages: the packages that count by their sources if these are used in place.
        plugins: what the names of its groups of plugins (entry points) begin with, before a dot.
    """

    value: str
    starts_at: Callable[[Sequence[str]], Indices | None] | None = None
    distributions: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    plugins: str = ""


SERVERS: Mapping[str, Server] = MappingProxyType(
    {
        "vllm": Server(
            "aotgaudi.wrap.adapters.vllm:VLLM", find_vllm, ("vllm", "vllm-*"), ("vllm",), plugins="vllm"
        ),
        "vllm-gaudi": Server(
            "aotgaudi.wrap.adapters.vllm_gaudi:VLLM_GAUDI",
            distributions=("habana*", "neural-compressor*"),
            packages=("vllm_gaudi", "vllm_hpu_extension"),
        ),
        "sglang": Server(
            "aotgaudi.wrap.adapters.sglang:SGLANG",
            find_sglang,
            ("sglang*", "sgl-*"),
            ("sglang",),
            plugins="sglang",
        ),
        "fake": Server("aotgaudi.wrap.adapters.fake:FAKE", find_fake),
    }
)
"""Every kind of server, by its name in a launch."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a command starts a server.

    Attributes:
        server: a key of `SERVERS`.
        at: the index of the first word that starts the server.
        after: the index of the first word after that.
        environ: the command's environment, including the command's own assignments (``env NAME=VALUE``).
    """

    server: str
    at: int
    after: int
    environ: Mapping[str, str]

    def interpreter(self, words: Sequence[str], cwd: Path) -> str:
        """Returns the path of the Python that runs the server. Raises SpecError."""
        before = [word for word in words[: self.at] if not word.startswith("-")]
        if before and _PYTHON.fullmatch(before[-1].rpartition("/")[2]):
            return _program(before[-1], self.environ, cwd)
        if words[self.at] == "-m":
            raise SpecError(WHERE, "names no interpreter before -m", "python -m ...")
        return _of_script(_program(words[self.at], self.environ, cwd), self.environ, cwd)


def plain_command(words: Sequence[str], caller: Mapping[str, str], cwd: Path) -> PlainCommand:
    """Returns the command without what stands around it: a shell, ``docker run``, a file of flags. Raises SpecError.

    Args:
        words: as they are kept.
        caller: the environment of the caller.
        cwd: the directory of relative paths.
    """
    if not any(word.rpartition("/")[2] in FORMS or word.partition("=")[0] == "--config" for word in words):
        return PlainCommand(words=tuple(words))
    from aotgaudi.commands.forms import read_form  # Only here: it loads the tables of flags.

    return read_form(PlainCommand(words=tuple(words)), caller, cwd)


def find_start(words: Sequence[str], environ: Mapping[str, str]) -> Start:
    """Returns where a command starts a server. Raises SpecError if it starts none, or if a program in front may hide one."""
    _require_text(words)
    for name, server in SERVERS.items():
        is_enabled = name != "fake" or environ.get(FAKE_SWITCH) == "1"
        found = server.starts_at(words) if server.starts_at is not None and is_enabled else None
        if found is not None:
            at, after = found
            _require_wrappers(words[:at])
            return Start(name, at, after, MappingProxyType({**environ, **dict(assignments(words[:at]))}))
    if not words:
        raise SpecError(WHERE, "is empty", REMEDY)
    raise SpecError(WHERE, f"{shown(' '.join(words))} starts no server that is known", REMEDY)


def working_directory() -> Path:
    """Returns the working directory. Raises SpecError if it has been removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise SpecError(
            "the working directory", f"cannot be used: {error.strerror}", "cd to one that is there"
        ) from error


def _require_text(words: Sequence[str]) -> None:
    """Raises SpecError for a word that no document can hold: bytes that are not UTF-8 become lone surrogates in Python."""
    for word in words:
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            raise SpecError(WHERE, f"has {word!a:.100}, which is not UTF-8", "UTF-8 throughout")


def _require_wrappers(head: Sequence[str]) -> None:
    if not head:
        return
    program = head[0].rpartition("/")[2]
    if program == "env" and len(head) > 1 and head[1].startswith("-"):
        raise SpecError(
            WHERE, "has options of env, which change what is read here", "env NAME=VALUE ... alone"
        )
    if program in WRAPPERS or _PYTHON.fullmatch(program) or any(assignments(head[:1])):
        return
    remedy = f"the server's own command; one of {', '.join(sorted(WRAPPERS))} may stand in front of it"
    raise SpecError(WHERE, f"begins with {shown(head[0])}, which may start something else", remedy)


def _program(word: str, environ: Mapping[str, str], cwd: Path) -> str:
    found = str(cwd / word) if "/" in word else shutil.which(word, path=environ.get("PATH", os.defpath))
    if found is None or not os.access(found, os.X_OK):
        raise SpecError(
            WHERE, f"{shown(word)} is no program on this machine", "its path, or activate its environment"
        )
    return found


def _of_script(path: str, environ: Mapping[str, str], cwd: Path) -> str:
    """Returns the interpreter in the first line of a console script, or in its second if the first was too short."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise SpecError(WHERE, f"{path} cannot be read: {error.strerror}", "python -m ...") from error
    first = head.partition(b"\n")[0]
    exec_line = _EXEC_LINE.search(head)
    if exec_line is not None:
        return os.fsdecode(exec_line[1].strip(b'"'))
    if not first.startswith(b"#!"):
        raise SpecError(WHERE, f"{path} is no script of Python's", "python -m ...")
    program, *arguments = os.fsdecode(first[2:]).split() or [""]
    if program.rpartition("/")[2] == "env":
        named = [word for word in arguments if not word.startswith("-")]
        return _program(named[0] if named else "", environ, cwd)
    if not _PYTHON.fullmatch(program.rpartition("/")[2]):
        raise SpecError(WHERE, f"{path} is run by {shown(program)}, which is no Python", "python -m ...")
    return program


_DISTRIBUTIONS = """
    torch torch-* torchvision torchaudio triton triton-* pytorch-triton* intel-extension-*
    transformers numpy compressed-tensors xgrammar gguf bitsandbytes humming*
    flashinfer* flash-attn* flash-mla* xformers deep-gemm deepgemm tilelang apache-tvm*
    nvidia-* cuda-* cutlass* quack-kernels amd-aiter aiter rocm* intel-openmp
    """
DISTRIBUTIONS = tuple(_DISTRIBUTIONS.split())
"""Patterns of normalised names (PEP 503) of distributions that make code or are traced, besides those of a server
(`Server`). A server's plugins count too, because they run in its processes."""
_PACKAGES = ("torch", "triton", "transformers")
"""Packages that count by their sources if these are used in place, besides those of a server."""

_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A question: the path of the interpreter, and the JSON that `installed_script` reads."""

    interpreter: str
    text: str


def question_of(words: Sequence[str], start: Start, cwd: Path) -> Question:
    """Returns the question for a command that starts a server.

    The script searches ``PYTHONPATH`` and the user's site as the server would, and for ``python -m`` the working directory.

    Raises:
        SpecError: the command names no Python.
    """
    first = (str(cwd),) if words[start.at] == "-m" else ()
    ahead = [*first, *filter(None, start.environ.get("PYTHONPATH", "").split(":"))]
    question = {
        "patterns": [*DISTRIBUTIONS, *(name for one in SERVERS.values() for name in one.distributions)],
        "packages": [*_PACKAGES, *(name for one in SERVERS.values() for name in one.packages)],
        "groups": [one.plugins for one in SERVERS.values() if one.plugins],
        "ahead": ahead,
        "home": start.environ.get("HOME", ""),
    }
    return Question(start.interpreter(words, cwd), json.dumps(question))


class Asking:
    """A question that was asked. A context manager that ends the script if it is still running. For one thread."""

    def __init__(self, question: Question) -> None:
        """Starts the interpreter. If that fails, `answer` raises the error."""
        self.question = question
        script = Path(__file__).with_name("installed_script.py").read_text(encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        try:
            self._process = subprocess.Popen(
                [question.interpreter, "-I", "-c", script, question.text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._failure = error

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.communicate()

    def answer(self) -> bytes:
        """Waits for the answer and returns it. Raises TargetError."""
        interpreter = self.question.interpreter
        if self._process is None:
            raise TargetError(f"software: {interpreter} cannot be asked: {self._failure}") from self._failure
        try:
            answer, errors = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TargetError(f"software: {interpreter} cannot be asked: {error}") from error
        if self._process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            told = "".join(last) or f"it ended with {self._process.returncode}"
            raise TargetError(f"software: {interpreter} fails: {told}")
        return answer


def begin(words: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None) -> Asking | None:
    """Asks about a command in `cwd` (None: here). Returns None for a refused command; `find_server` then says why."""
    try:
        here = cwd or working_directory()
        plain = plain_command(words, environ, here)
        start = find_start(plain.words, {**environ, **plain.variables})
        return Asking(question_of(plain.words, start, here))
    except SpecError:
        return None
