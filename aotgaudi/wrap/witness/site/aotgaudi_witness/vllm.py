"""What vLLM counts, hashes and loads; and what of it is repaired.

* ``vllm.compilation.counter.compilation_counter`` counts artifacts that were loaded, and compilations. Its class is given a
  ``__setattr__`` that tells of each at once, with where it came from.
* ``vllm.config.utils.hash_factors`` turns what decides a compilation into a hash; it is replaced by one that tells what it
  is given. Most of vLLM imports it inside functions, and so gets ours; modules that did it before are given it too.
* ``DPCoordinatorProc`` (vllm/v1/engine/coordinator.py) runs in a process that loads no plugins: it is started so that it has
  a witness all the same.
* Repairs (`REPAIRS`) make a load succeed that vLLM itself meant to do. They change nothing that is computed.

Sources: those modules of vLLM 0.32, compilation/decorators.py and compilation/caching.py.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

from aotgaudi_witness import register
from aotgaudi_witness.hooks import Install
from aotgaudi_witness.report import Report
from aotgaudi_witness.stacks import is_secret
from aotgaudi_witness.witness import Witness

FINALIZE_LOADING = "vllm.finalize-loading"

_COUNTER = "vllm.compilation.counter"
_COORDINATOR = "vllm.v1.engine.coordinator"
_FACTORS = "vllm.config.utils"
_TOLD_AT_ONCE: Mapping[str, tuple[str, str]] = {
    "num_aot_artifacts_loaded": ("loaded", "aot"),
    "num_compiled_artifacts_loaded": ("loaded", "piece"),
    "num_aot_compiles": ("generate", "aot"),
}
"""What of vLLM's counters is told as an event: its kind, and what it is about. The others are told as counters: they also
count what was found in a cache."""
_PLAIN_CHARACTERS = 120


def adapt(witness: Witness) -> None:
    """Adds the hooks, and the repairs that are asked for."""
    report = witness.report
    witness.hooks.add("vllm.counters", _COUNTER, lambda module: _see_counter(module, report))
    witness.hooks.add("vllm.factors", _FACTORS, lambda module: _see_factors(module, report))
    witness.hooks.add("vllm.coordinator", _COORDINATOR, _see_coordinator)
    witness.count(_counters)
    for repair in sorted(witness.settings.repairs):
        module, apply = REPAIRS.get(repair, ("sys", lambda module: "this witness knows no such repair"))
        witness.hooks.add(f"repair.{repair}", module, _repairing(repair, apply, report))


def _see_counter(module: ModuleType, report: Report) -> bool:
    counter = getattr(module, "compilation_counter", None)
    kind = type(counter)
    if not all(hasattr(counter, name) for name in ("num_aot_artifacts_loaded", "num_aot_compiles")):
        return False

    def tell(self: Any, name: str, value: Any) -> None:
        before = self.__dict__.get(name, 0)
        object.__setattr__(self, name, value)
        told = _TOLD_AT_ONCE.get(name)
        if told is not None and self is counter and isinstance(value, int) and value > before:
            frame = sys._getframe(1)
            _tell_count(report, told, frame)

    kind.__setattr__ = tell  # type: ignore[method-assign, assignment]
    return True


def _tell_count(report: Report, told: tuple[str, str], frame: FrameType) -> None:
    event, what = told
    try:
        name = _artifact(frame)
        if event == "loaded":
            report.emit(event, what=what, name=name)
        else:
            report.emit(event, what=what, name=name, stack=report.stack(frame))
    except Exception as error:  # the guest goes on; the witness says that it is blind
        report.fault("vllm.counters", error)


def _artifact(frame: FrameType) -> str:
    """Returns which part of which model an artifact is for, as vLLM calls it: ``rank_0_0/model``, after its tag, if any.

    The directory that it lies in is named by a hash, which says nothing that is the same in each build.
    """
    found = frame.f_locals
    model = found.get("model", found.get("self"))
    tag = getattr(model, "_compile_tag", "") or ""
    path = str(found.get("aot_compilation_path") or getattr(model, "_aot_compilation_path", "") or "")
    place = "/".join(path.split("/")[-2:]) if path else str(found.get("key", "") or frame.f_code.co_name)
    return f"{tag}:{place}" if tag else place


def _counters() -> Mapping[str, int]:
    counter = getattr(sys.modules.get(_COUNTER), "compilation_counter", None)
    if counter is None:
        return {}
    return {f"vllm.{name}": value for name, value in vars(counter).items() if isinstance(value, int)}


def _see_coordinator(module: ModuleType) -> bool:
    kind: Any = getattr(module, "DPCoordinatorProc", None)
    if not callable(getattr(kind, "run_coordinator", None)):
        return False
    kind.run_unwitnessed, kind.run_coordinator = kind.run_coordinator, staticmethod(run_coordinator)
    return True


def run_coordinator(*args: Any, **kwargs: Any) -> Any:
    """Runs vLLM's coordinator of data-parallel ranks with a witness. A process is started with it, by its name."""
    register()
    kind = importlib.import_module(_COORDINATOR).DPCoordinatorProc
    return getattr(kind, "run_unwitnessed", kind.run_coordinator)(*args, **kwargs)  # Its own, if that failed.


def _see_factors(module: ModuleType, report: Report) -> bool:
    compute = getattr(module, "hash_factors", None)
    if compute is None:
        return False

    told: set[tuple[str, str]] = set()

    @functools.wraps(compute)
    def seen(items: dict[str, object], *args: Any, **kwargs: Any) -> Any:
        digest = compute(items, *args, **kwargs)
        try:
            key = (_whose(sys._getframe(1)), str(digest))
            if key not in told:  # An API server hashes its configuration for every request.
                told.add(key)
                values = {str(name): told_value(str(name), value) for name, value in items.items()}
                report.emit_values("factors", values, name=key[0])
        except Exception as error:  # the guest goes on; the witness says that it is blind
            report.fault("vllm.factors", error)
        return digest

    for name, other in tuple(sys.modules.items()):
        found = vars(other) if name.partition(".")[0] == "vllm" else {}
        if found.get("hash_factors") is compute:
            found["hash_factors"] = seen
    return module.hash_factors is seen


def _whose(frame: FrameType) -> str:
    """Returns whose factors are hashed: a class of vLLM's configuration, or a function's name."""
    owner = frame.f_locals.get("self")
    return type(owner).__name__ if owner is not None else frame.f_code.co_name


def told_value(name: str, value: object) -> object:
    """Returns a factor as it may be written down: short ones as they are, others by their sha256, secrets not at all."""
    if is_secret(name):
        return "***" if value else value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and len(value) <= _PLAIN_CHARACTERS:
        return value
    text = json.dumps(value, sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _repairing(repair: str, apply: Callable[[ModuleType], str], report: Report) -> Install:
    def install(module: ModuleType) -> bool:
        why = apply(module)
        report.emit("repair", id=repair, applied=not why, why=why)
        return True

    return install


def _finalize_loading(module: ModuleType) -> str:
    """On CPUs vLLM saves torch's own artifact, then calls a method of it that only vLLM's own has.

    The error is caught, and all is compiled again at each start: ``_try_load_aot_compiled_fn`` in compilation/decorators.py.
    Torch's is whole as it was loaded, so there is nothing for the method to do. Returns why this is not needed, or "".
    """
    kind = getattr(module, "BundledAOTAutogradSerializableCallable", None)
    if kind is None:
        return "this torch has no such artifact"
    if any("finalize_loading" in vars(base) for base in kind.__mro__):
        return "this torch's artifact can finalize itself"
    kind.finalize_loading = lambda self, vllm_config: None
    return ""


REPAIRS: Mapping[str, tuple[str, Callable[[ModuleType], str]]] = {
    FINALIZE_LOADING: ("torch._dynamo.aot_compile_types", _finalize_loading),
}
"""Repair -> the module that it is about, and what does it: that returns why it was not needed, or nothing."""
