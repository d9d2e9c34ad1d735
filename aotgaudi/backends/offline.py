"""Backend name -> target and compiler. Offline half; the heavy libraries load only when named."""

from __future__ import annotations

from collections.abc import Iterator

from aotgaudi.backends.base import Compiler, Target
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.target import TargetSpec

AVAILABLE = ("cpu", "fake")


def build_target(spec: BuildSpec) -> Target:
    """Returns what this machine compiles `spec` for.

    Raises:
        SpecError: the backend cannot be built for here, or the spec asks for what can only be enumerated.
    """
    target = probe_target(spec.target)
    for where, problem in _enumerated_only(spec):
        remedy = "one device, unquantized and without adapters; `aotgaudi build manifest` enumerates it"
        raise SpecError(where, f"{problem}, which the {target.backend} backend cannot build", remedy)
    return target


def _enumerated_only(spec: BuildSpec) -> Iterator[tuple[str, str]]:
    """Yields the place and the problem of everything that no backend here can build yet."""
    parallel, quantization = spec.parallel, spec.model.quantization
    if parallel.tensor_parallel_size > 1:
        yield "parallel.tensor_parallel_size", f"is {parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        yield "parallel.pipeline_parallel_size", f"is {parallel.pipeline_parallel_size}"
    if parallel.expert_parallel:
        yield "parallel.expert_parallel", "is true"
    if quantization is not None:
        given = quantization.model_dump(mode="json", exclude_defaults=True)
        yield "model.quantization", "has " + ", ".join(f"{name} {value!r}" for name, value in given.items())
    if spec.model.states("quantization_config"):
        yield "model.config.quantization_config", "says that the checkpoint is quantized"
    if spec.lora is not None:
        yield "lora", f"asks for {spec.lora.max_loras} adapter slots"


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
    """Returns `target` as it would be on a machine of level `isa`. Raises SpecError if there is no such level."""
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
