"""Backend name -> target and compiler. Offline half; the heavy libraries load only when named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from aotgaudi.backends.base import Compiler, Target
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.gaudi.identity import find_cards
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.target import TargetSpec
from aotgaudi.store.location import default_store_root

AVAILABLE = ("cpu", "hpu")
"""What users may build for. The backend "fake" is for tests, and no message offers it."""

_PACKING_BACKENDS = ("cpu", "fake")
"""Backends whose linear layers can take packed weights (``graphs/quantization.py``)."""

_HPU_DTYPES = ("bfloat16", "float32")

HPU_NEEDS = (
    "it takes a Gaudi; elsewhere `aotgaudi build plan --target FILE` plans it, with what"
    " `aotgaudi doctor --hpu --write-target FILE` wrote on one"
)
"""What compiling for hpu takes, for error messages."""


def build_target(spec: BuildSpec, described: Target | None = None) -> Target:
    """Returns the target of `spec` on this machine, or `described`, which can only be planned for.

    Raises:
        SpecError: the backend cannot be built for here, or the spec asks for what can only be enumerated.
    """
    target = find_target(spec.target, described)
    if spec.model.weights_dtype is not None:
        _require_packable(spec, target)
    for where, problem in _enumerated_only(spec):
        remedy = "one device, unquantized and without adapters; `aotgaudi build manifest` enumerates it"
        raise SpecError(where, f"{problem}, which the {target.backend} backend cannot build", remedy)
    if target.backend == "hpu" and described is None:
        _require_buildable_on_hpu(spec)
    return target


def _require_buildable_on_hpu(spec: BuildSpec) -> None:
    """Raises SpecError for what the hpu backend was not written for; it can be planned all the same."""
    mode = spec.target.execution_mode
    if mode not in (None, "torch_compile"):
        raise SpecError(
            "target.execution_mode",
            f"is {mode!r}, whose graphs exist in one process alone, so nothing of them could be sealed",
            'target.execution_mode = "torch_compile"',
        )
    if spec.model.dtype not in _HPU_DTYPES:
        raise SpecError(
            "model.dtype",
            f"is {spec.model.dtype!r}, which the hpu backend cannot build",
            f"one of {', '.join(_HPU_DTYPES)}",
        )


def _enumerated_only(spec: BuildSpec) -> Iterator[tuple[str, str]]:
    """Yields the place and the problem of everything in a spec that no backend can build yet."""
    parallel, quantization = spec.parallel, spec.model.quantization
    if parallel.tensor_parallel_size > 1:
        yield "parallel.tensor_parallel_size", f"is {parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        yield "parallel.pipeline_parallel_size", f"is {parallel.pipeline_parallel_size}"
    if parallel.data_parallel_size > 1:
        yield "parallel.data_parallel_size", f"is {parallel.data_parallel_size}"
    if parallel.expert_parallel:
        yield "parallel.expert_parallel", "is true"
    if quantization is not None and spec.model.weights_dtype is None:
        given = quantization.model_dump(mode="json", exclude_defaults=True)
        yield "model.quantization", "has " + ", ".join(f"{name} {value!r}" for name, value in given.items())
    if spec.model.states("quantization_config"):
        yield "model.config.quantization_config", "says that the checkpoint is quantized"
    if spec.lora is not None:
        yield "lora", f"asks for {spec.lora.max_loras} adapter slots"


def _require_packable(spec: BuildSpec, target: Target) -> None:
    """Raises SpecError where linear layers cannot take their weights packed."""
    where, asked = "model.quantization.weights", f"is {spec.model.weights_dtype!r}"
    if spec.model.states("quantization_config"):
        raise SpecError(
            where,
            f"{asked}, and the checkpoint is quantized already (config.json has a quantization_config)",
            "a checkpoint in bfloat16, float16 or float32",
        )
    if target.backend not in _PACKING_BACKENDS:
        raise SpecError(
            where, f"{asked}, which the {target.backend} backend cannot build", 'target.backend = "cpu"'
        )


def find_target(spec: TargetSpec, described: Target | None = None) -> Target:
    """Returns `described`, if given, else the target of `spec` on this machine.

    Raises:
        SpecError: as `probe_target` does; or `described` is not whole, or of another backend than the spec.
    """
    if described is None:
        return probe_target(spec)
    for backend, whose in ((spec.backend, "the spec's target.backend"), (described.backend, "that file's")):
        if backend != "hpu":
            raise SpecError("--target", f"is for hpu alone, and {whose} is {backend!r}", "leave it out")
    from aotgaudi.backends.hpu.probe import require_whole

    require_whole(described)
    return described


def probe_target(spec: TargetSpec) -> Target:
    """Returns the target of `spec` on this machine. Raises SpecError for a backend that cannot be built here."""
    if spec.backend == "cpu":
        from aotgaudi.backends.inductor.probe import probe

        return probe(spec.isa)
    if spec.backend == "fake":
        from aotgaudi.backends.fake import probe as fake_probe

        return fake_probe()
    if spec.backend == "hpu":
        return _hpu_target(spec)
    raise SpecError(
        "target.backend",
        f"{spec.backend!r} cannot be compiled for yet",
        f"available: {', '.join(AVAILABLE)}",
    )


def _hpu_target(spec: TargetSpec) -> Target:
    """Raises SpecError where this machine has no Gaudi: then a spec for one can be planned, but not built."""
    from aotgaudi.backends.hpu.probe import probe

    try:
        find_cards().device_type()
    except TargetError as error:
        without_gaudi = ", ".join(name for name in AVAILABLE if name != "hpu")
        raise SpecError(
            "target.backend",
            f"'hpu' cannot be compiled for here: {HPU_NEEDS} ({str(error).removeprefix('target: ')})",
            f"available here: {without_gaudi}",
        ) from error
    return probe(os.environ, default_store_root())


def make_compiler(target: Target) -> Compiler:
    """Returns the compiler for a probed target."""
    if target.backend == "fake":
        from aotgaudi.backends.fake import FakeCompiler

        return FakeCompiler(target)
    if target.backend == "hpu":
        from aotgaudi.backends.hpu.compiler import HpuCompiler

        return HpuCompiler(target)
    from aotgaudi.backends.inductor.compiler import InductorCompiler

    return InductorCompiler(target)


def what_is_compared(target: Target) -> str:
    """Returns what `differences` compares, for people."""
    if target.backend != "hpu":
        return "bytes"
    return "keys of recipes and numbers; a recipe's bytes hold a counter of the process that compiled it"


def differences(target: Target, stored: Mapping[str, Path], rebuilt: Mapping[str, Path]) -> tuple[str, ...]:
    """Returns the files in which two compilations of a unit differ, where they must agree: names, sorted."""
    if target.backend == "hpu":
        from aotgaudi.gaudi.recipes import RecipeName

        # Their names hold the keys; unit.json lists them (docs/adr/0023-hpu-backend.md).
        recipes = {name for name in {*stored, *rebuilt} if RecipeName.parse(name) is not None}
    else:
        recipes = set()

    def differs(name: str) -> bool:
        if name not in stored or name not in rebuilt:
            return True
        return name not in recipes and stored[name].read_bytes() != rebuilt[name].read_bytes()

    return tuple(name for name in sorted({*stored, *rebuilt}) if differs(name))
