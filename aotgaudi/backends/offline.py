"""Backend name -> target and compiler. Offline half; the heavy libraries load only when named."""

from __future__ import annotations

from aotgaudi.backends.base import Compiler, Target
from aotgaudi.errors import SpecError
from aotgaudi.spec.target import TargetSpec

AVAILABLE = ("cpu", "fake")


def probe_target(spec: TargetSpec) -> Target:
    """Returns what this machine compiles for `spec`. Raises SpecError for a backend that cannot be built here."""
    if spec.backend == "cpu":
        from aotgaudi.backends.inductor.probe import probe

        return probe(spec.isa)
    if spec.backend == "fake":
        from aotgaudi.backends.fake.probe import probe as fake_probe

        return fake_probe()
    raise SpecError(
        "target.backend", f"{spec.backend!r} cannot be compiled for yet", f"available: {', '.join(AVAILABLE)}"
    )


def with_isa(target: Target, isa: str) -> Target:
    """Returns `target` as it would be on a machine of level `isa`. Raises SpecError where that is no level."""
    if target.backend != "cpu":
        return target.model_copy(update={"isa": tuple(isa.split())})
    from aotgaudi.backends.inductor.probe import at_level

    return at_level(target, isa)


def make_compiler(target: Target) -> Compiler:
    """Returns the compiler for a probed target."""
    if target.backend == "fake":
        from aotgaudi.backends.fake.compiler import FakeCompiler

        return FakeCompiler(target)
    from aotgaudi.backends.inductor.compiler import InductorCompiler

    return InductorCompiler(target)
