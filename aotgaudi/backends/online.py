"""Target -> runtime. Online half: nothing here can reach a compiler."""

from __future__ import annotations

import os

from aotgaudi.backends.base import NOT_INSTALLED, Runtime, Target, version_of
from aotgaudi.errors import TargetError
from aotgaudi.store.location import default_store_root


def this_machine() -> Target | None:
    """Returns what this machine offers to a bundle; None if it cannot serve because torch is missing."""
    if version_of("torch") == NOT_INSTALLED:
        return None
    from aotgaudi.backends.inductor import probe

    return probe.this_machine()


def check_target(target: Target, machine: Target | None = None) -> None:
    """Raises TargetError, naming the factor, unless `machine` (None: this one) satisfies `target`. Imports no torch."""
    if target.backend not in ("cpu", "hpu"):
        raise TargetError(
            f"target: compiled for the backend {target.backend!r}; this server runs 'cpu' and 'hpu' bundles"
        )
    if machine is not None and machine.backend != target.backend:
        raise TargetError(
            f"target: compiled for the backend {target.backend!r}, that machine has {machine.backend!r}"
        )
    if target.backend == "hpu":
        from aotgaudi.backends.hpu import probe

        probe.require_satisfied(target, os.environ, machine, default_store_root())
        return
    from aotgaudi.backends.inductor.probe import require_satisfied

    require_satisfied(target, machine)


def prepare_process(target: Target) -> None:
    """Prepares this process for `make_runtime`, before torch is imported. Raises TargetError where that is too late."""
    if target.backend == "hpu":
        from aotgaudi.backends.hpu.process import prepare

        prepare()


def make_runtime(target: Target) -> Runtime:
    """Returns the runtime for a target that `check_target` has passed."""
    check_target(target)
    if target.backend == "hpu":
        from aotgaudi.backends.hpu.runtime import HpuRuntime

        return HpuRuntime(target)
    from aotgaudi.backends.inductor.runtime import InductorRuntime

    return InductorRuntime(target)
