"""What a process of the guest is: its role, and what it was forked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

API_SERVER, ENGINE_CORE, WORKER, REGISTRY, OTHER = "APIServer", "EngineCore", "Worker", "Registry", "other"
COORDINATOR = "DPCoordinator"

_ROLES = (
    (re.compile(r"^api[-_]?server", re.IGNORECASE), API_SERVER),
    (re.compile(r"^(dp)?engine[-_]?core", re.IGNORECASE), ENGINE_CORE),
    (re.compile(r"^(vllm)?worker", re.IGNORECASE), WORKER),
    (re.compile(r"^(vllm_)?dp_?coordinator", re.IGNORECASE), COORDINATOR),
)
_REGISTRY = "vllm.model_executor.models.registry"
_TARGETS = {
    "run_scheduler_process": WORKER,
    "run_data_parallel_controller_process": ENGINE_CORE,
}
"""What SGLang runs in processes to which it gives no name (sglang/srt/managers)."""


def role_of(process_name: str, argv: Sequence[str], target: str = "") -> str:
    """Returns the role of a process.

    Args:
        process_name: What multiprocessing calls it: ``MainProcess`` for one that it did not start.
        argv: Its command.
        target: The function that it was started for, where its name says nothing.
    """
    if process_name == "MainProcess":
        return REGISTRY if _REGISTRY in argv else API_SERVER
    named = next((role for pattern, role in _ROLES if pattern.match(process_name)), None)
    return named or _TARGETS.get(target, OTHER)


def command() -> list[str]:
    """Returns the command of this process as it was given, interpreter and all, where Python knows it (from 3.10 on)."""
    return list(getattr(sys, "orig_argv", sys.argv))


class Started(NamedTuple):
    """What multiprocessing knows of a process: its name, the function that it was started for, and its parent's name."""

    name: str
    target: str = ""
    parent: str = ""


def here() -> Started:
    """Returns what multiprocessing knows of this process."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return Started("MainProcess") if multiprocessing is None else _named(multiprocessing.current_process())


def forked() -> Started | None:
    """Returns, in a child just forked, what `here` will say once multiprocessing has set it up.

    None where the child is about to become another program: subprocess forks, then executes.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "subprocess":
            return None
        if module == "multiprocessing.popen_fork" and "process_obj" in frame.f_locals:
            return _named(frame.f_locals["process_obj"])
        frame = frame.f_back
    return Started("forked")


def _named(process: Any) -> Started:
    target = getattr(getattr(process, "_target", None), "__name__", "")
    return Started(str(process.name), str(target), str(getattr(process, "_parent_name", "")))
