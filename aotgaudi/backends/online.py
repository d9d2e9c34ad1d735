"""Target -> runtime. Online half: nothing here can reach a compiler."""

from __future__ import annotations

from aotgaudi.backends.base import NOT_INSTALLED, Runtime, Target, version_of
from aotgaudi.errors import TargetError


def this_machine() -> Target | None:
    """Returns what this machine offers to a bundle; None if it cannot serve because torch is missing."""
    if version_of("torch") == NOT_INSTALLED:
        return None
    from aotgaudi.backends.inductor import probe

    return probe.this_machine()


def check_target(target: Target, machine: Target | None = None) -> None:
    """Raises TargetError, naming the factor, unless `machine` (None: this one) satisfies `target`. Imports no torch."""
    if target.backend != "cpu":
        raise TargetError(
            f"target: compiled for the backend {target.backend!r}; this server runs 'cpu' bundles"
        )
    if machine is not None and machine.backend != target.backend:
        raise TargetError(
            f"target: compiled for the backend {target.backend!r}, that machine has {machine.backend!r}"
        )
    from aotgaudi.backends.inductor.probe import require_satisfied

    require_satisfied(target, machine)


def make_runtime(target: Target) -> Runtime:
    """Returns the runtime for a target that `check_target` has passed."""
    check_target(target)
    from aotgaudi.backends.inductor.runtime import InductorRuntime

    return InductorRuntime(target)
