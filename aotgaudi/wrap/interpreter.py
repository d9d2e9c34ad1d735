"""Asks a server's interpreter what it has installed, from metadata alone. Nothing of the server is imported. Takes 0.1 s.

The interpreter runs a script of the standard library (Python 3.9 and later) in isolated mode. The script names a
distribution by its version and by the sha256 of its RECORD, which lists every file with its digest, so another build of the
same version is other software. Only lines of RECORD that do not depend on the place of installation count: no console
scripts (their first line names the interpreter), no bytecode, no files of the installer. Sources that are used in place (an
editable install, a checkout on ``PYTHONPATH`` or in the working directory) are named by the content of their ``.py`` files.

The question follows from the words of a command. We ask first, and read the answer when we need it. Meanwhile we import the
rest and verify the bundle, so this module imports almost nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.errors import SpecError, TargetError
from aotgaudi.wrap.starts import SERVERS, Start, find_start, working_directory

DISTRIBUTIONS = (
    *(
        "torch",
        "torch-*",
        "torchvision",
        "torchaudio",
        "triton",
        "triton-*",
        "pytorch-triton*",
        "intel-extension-*",
    ),
    *("transformers", "numpy", "compressed-tensors", "xgrammar", "gguf", "bitsandbytes", "humming*"),
    *(
        "flashinfer*",
        "flash-attn*",
        "flash-mla*",
        "xformers",
        "deep-gemm",
        "deepgemm",
        "tilelang",
        "apache-tvm*",
    ),
    *(
        "nvidia-*",
        "cuda-*",
        "cutlass*",
        "quack-kernels",
        "amd-aiter",
        "aiter",
        "rocm*",
        "intel-openmp",
    ),
)
"""Patterns of normalised names (PEP 503) of distributions that make code or are traced, besides those of a server
(`starts.Server`). A server's plugins count too, because they run in its processes."""
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
        return Asking(question_of(words, find_start(words, environ), cwd or working_directory()))
    except SpecError:
        return None
