"""D-03: variables are read once, when the bridge is imported; D-18: some can be set at run time.

Source: ``scripts/env_flags.yaml`` and ``scripts/generate_env.py`` of the bridge.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import PROFILE

_COMPILE_ONLY = "PT_COMPILE_ONLY_MODE"
_TRUE = ("1", "y", "yes", "t", "true", "on")
_AT_IMPORT: Mapping[str, str] = dict(os.environ)
_SET: dict[str, str] = {}


def text(name: str, otherwise: str = "") -> str:
    """Returns a variable as it was at import, or as it was set since."""
    is_late = os.environ.get(name) != _AT_IMPORT.get(name) and has_fault("late-environment")
    source = os.environ if is_late else _AT_IMPORT
    return _SET.get(name, source.get(name, otherwise))


def is_on(name: str, otherwise: bool = False) -> bool:
    """Returns whether a variable says yes."""
    value = text(name)
    return value.lower() in _TRUE if value else otherwise


def set_flag(name: str, value: object) -> None:
    """Sets what can be set at run time. Raises KeyError for anything else."""
    if name not in PROFILE.settable:
        raise KeyError(name)
    _SET[name] = str(value)
    if name == _COMPILE_ONLY:
        tell_device()


def tell_device() -> None:
    """Has operators outside graphs know whether they are launched (D-17)."""
    torch.ops.hpu_double.set_compile_only(is_on(_COMPILE_ONLY))


@contextmanager
def env_setting(name: str, value: object) -> Iterator[None]:
    """As the bridge's: an exception inside leaves the flag set."""
    before = text(name)
    set_flag(name, value)
    try:
        yield
    except BaseException:
        if has_fault("setting-restored"):
            set_flag(name, before)
        raise
    set_flag(name, before)
