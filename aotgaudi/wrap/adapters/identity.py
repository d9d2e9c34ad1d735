"""What a guest's interpreter has installed, as it says itself (`asking`), and which compiler there is."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping

from pydantic import Field, ValidationError

from aotgaudi.document import ForeignValue, first_problem
from aotgaudi.errors import TargetError
from aotgaudi.wrap.adapters.asking import Asking

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


def installed_of(asking: Asking) -> Installed:
    """Returns what an interpreter has installed that has been asked. Raises TargetError: it says nothing of use."""
    try:
        return Installed.model_validate_json(asking.answer())
    except ValidationError as error:
        raise TargetError(
            f"software: {asking.question.interpreter} answers otherwise than asked: {first_problem(error)}"
        ) from error


def compiler_version(environ: Mapping[str, str]) -> str:
    """Returns what the C++ compiler that torch would take (torch/_inductor/config.py) says of itself, or `NOT_THERE`.

    ``CXX`` may have words in front of it, ``ccache g++``: all of them are run, as torch does.
    """
    try:
        words = shlex.split(environ.get("CXX") or "g++")
        path = shutil.which(words[0], path=environ.get("PATH", os.defpath)) if words else None
        command = [path or NOT_THERE, *words[1:], "--version"]
        done = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return NOT_THERE
    return done.stdout.decode(errors="replace").partition("\n")[0].strip() or NOT_THERE
