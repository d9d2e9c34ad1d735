"""Target -> runtime. Online half: nothing here can reach a compiler."""

from __future__ import annotations

from aotgaudi.backends.base import Runtime, Target
from aotgaudi.errors import TargetError


def check_target(target: Target) -> None:
    """Raises TargetError, naming the factor, unless this machine satisfies `target`. Imports no torch."""
    if target.backend != "cpu":
        raise TargetError(
            f"target: compiled for the backend {target.backend!r}; this server runs 'cpu' bundles"
        )
    from aotgaudi.backends.inductor.probe import require_satisfied

    require_satisfied(target)


def make_runtime(target: Target) -> Runtime:
    """Returns the runtime for a target that `check_target` has passed."""
    check_target(target)
    from aotgaudi.backends.inductor.runtime import InductorRuntime

    return InductorRuntime(target)
