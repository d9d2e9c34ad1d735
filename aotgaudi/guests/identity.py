"""What a guest's interpreter has installed, from metadata alone: nothing of the guest is imported, so it takes 0.1 s.

The guest's own interpreter is asked, in isolated mode, with a script of the standard library (Python 3.9 and later). A
distribution is named by its version and by the sha256 of its RECORD, which lists every file with its digest: another build
of the same version is another software. Of RECORD only lines count that are the same wherever it is installed: no console
script (its first line names the interpreter), no bytecode, nothing that an installer leaves of itself. Sources that are used
in place (an editable install, a checkout on ``PYTHONPATH`` or in the working directory) are named by the content of their
``.py`` files.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from aotgaudi.backends.inductor.probe import tool_version
from aotgaudi.document import ForeignValue, first_problem
from aotgaudi.errors import SpecError, TargetError

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
        "habana*",
        "intel-openmp",
    ),
    *("sgl-kernel", "sglang-kernel"),
)
"""Patterns of normalised names (PEP 503) of distributions that make code, or are traced, whatever the guest is. What brings
plugins for a guest (entry points of groups ``vllm.*`` and ``sglang.*``) counts besides: they run in its processes."""

NOT_THERE = "none"
"""What is said of a compiler that is not there."""

_SECONDS = 60


class Installed(ForeignValue):
    """What an interpreter has.

    Attributes:
        python: version and ABI, ``3.12.3 cpython-312-x86_64-linux-gnu``.
        libc: as the system says it, ``glibc 2.36``.
        prefix: its ``sys.prefix``.
        site_packages: where packages written for it lie.
        distributions: normalised name -> ``VERSION SHA256``.
        names: normalised names of all distributions.
    """

    python: str
    libc: str
    prefix: str
    site_packages: str
    distributions: dict[str, str] = Field(default_factory=dict)
    names: tuple[str, ...] = ()

    def software(self, compiler: str) -> dict[str, str]:
        """Returns what a launch says of its software, given what the C++ compiler says of itself."""
        return {"python": self.python, "libc": self.libc, "compiler": compiler, **self.distributions}


def ask_interpreter(
    interpreter: str, patterns: Sequence[str], environ: Mapping[str, str], *, ahead: Sequence[str] = ()
) -> Installed:
    """Returns what `interpreter` has installed.

    Args:
        interpreter: the path of a Python.
        patterns: names of distributions that count, besides `DISTRIBUTIONS`.
        environ: the guest's environment: ``PYTHONPATH`` and the user's site are looked through as the guest would.
        ahead: directories that it would look through before these: the working directory for ``python -m``.

    Raises:
        TargetError: it does not run, or says nothing of use.
    """
    paths = [*ahead, *filter(None, environ.get("PYTHONPATH", "").split(":"))]
    question = {"patterns": [*DISTRIBUTIONS, *patterns], "ahead": paths, "home": environ.get("HOME", "")}
    try:
        done = subprocess.run(
            [interpreter, "-I", "-c", _script(), json.dumps(question)],
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return Installed.model_validate_json(done.stdout)
    except ValidationError as error:
        raise TargetError(
            f"software: {interpreter} answers otherwise than asked: {first_problem(error)}"
        ) from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TargetError(f"software: {interpreter} fails: {''.join(last) or error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise TargetError(f"software: {interpreter} cannot be asked: {error}") from error


def compiler_version(environ: Mapping[str, str]) -> str:
    """Returns what the C++ compiler that torch would take (torch/_inductor/config.py) says of itself, or `NOT_THERE`."""
    try:
        return tool_version(environ.get("CXX") or "g++")
    except SpecError:
        return NOT_THERE


@functools.cache
def _script() -> str:
    return Path(__file__).with_name("asked.py").read_text(encoding="utf-8")
