"""The bridge for probes: imports it, compiles with it, and counts.

`main` is the process of a probe.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from aotgaudi.child import die_with_parent, python_command
from aotgaudi.gaudi.counters import Counters, Counts
from aotgaudi.gaudi.environment import COMPILE_OPTIONS, recipe_directory
from aotgaudi.gaudi.recipes import flush_recipes

Run = Callable[..., Any]

OPTIONS: Mapping[str, object] = {
    name: value for name, value in COMPILE_OPTIONS.items() if name != "use_graph_freezing"
}
"""Options of the backend for everything that is compiled. A release that does not know the missing one refutes only K-05."""

SHAPES = ((4, 8), (8, 8))
"""The shapes of the inputs of each graph."""

MAX_ERROR = 4e-2
"""Relative to the largest value: bfloat16 has 8 bits, and sums of some hundred products lose a few."""

_PACKAGE = "habana_frameworks.torch"


class Bridge:
    """The bridge, which is imported when it is first used, with what probes need of it."""

    @functools.cached_property
    def torch(self) -> Any:
        """The module torch, and with it the bridge."""
        torch = importlib.import_module("torch")
        if not hasattr(torch, "hpu"):
            importlib.import_module(_PACKAGE)
        torch.set_grad_enabled(False)
        return torch

    @functools.cached_property
    def counters(self) -> Counters:
        """The counters of compiled graphs and recipes."""
        debug = self.module("utils.debug")
        return Counters(self.module("hpu.metrics"), getattr(debug, "_get_jit_cache_size", None))

    def is_registered(self) -> bool:
        """Returns whether importing torch._dynamo, or anything else so far, has registered ``hpu_backend``."""
        return "hpu_backend" in self._dynamo().list_backends(exclude_tags=())

    def module(self, name: str) -> Any:
        """Returns a module of the bridge, given its name below ``habana_frameworks.torch``."""
        assert self.torch
        return importlib.import_module(f"{_PACKAGE}.{name}")

    def compiled(self, function: Run, is_static: bool = True, /, **options: object) -> Run:
        """Returns `function` as ``torch.compile`` compiles it with the backend. Without `is_static`, Dynamo decides."""
        core = self.module("core")
        core.import_compilers()
        core.import_hpu_partition()

        class Module(self.torch.nn.Module):  # type: ignore[misc,name-defined]
            def forward(self, *args: Any) -> Any:
                return function(*args)

        return self.torch.compile(  # type: ignore[no-any-return]
            Module(),
            backend="hpu_backend",
            fullgraph=True,
            dynamic=False if is_static else None,
            options={**OPTIONS, **options},
        )

    def forget(self) -> None:
        """Resets Dynamo, so that earlier compilations do not affect later ones."""
        self._dynamo().reset()

    def placed(self, *tensors: Any) -> list[Any]:
        """Returns copies of the tensors on the device."""
        return [tensor.to("hpu") for tensor in tensors]

    def counts(self) -> Counts:
        """Returns the counts so far, after all work has finished."""
        self.torch.hpu.synchronize()
        return self.counters.read()

    def flush(self) -> bool:
        """Waits until every recipe is stored. Returns whether the bridge has a flush."""
        return flush_recipes(self.module("utils.debug"), recipe_directory())

    def random(self, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Any]:
        """Returns tensors of these shapes on the CPU, the same each time."""
        generator = self.torch.Generator().manual_seed(1)
        return [self.torch.randn(*shape, generator=generator) for shape in shapes]

    def _dynamo(self) -> Any:
        assert self.torch
        return importlib.import_module("torch._dynamo")


def difference(found: Any, wanted: Any) -> float:
    """Returns the largest difference relative to the largest wanted value; infinite if a value is not finite."""
    found, wanted = found.cpu().double(), wanted.double()
    if not bool(found.isfinite().all()):
        return math.inf
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def told(counts: Counts) -> dict[str, Any]:
    """Returns counts as plain values."""
    return {**asdict(counts), "hits": sorted(counts.hits), "misses": sorted(counts.misses)}


def one_line(error: BaseException) -> str:
    """Returns an exception and its cause as one line of at most 300 characters."""
    cause = f"; for {one_line(error.__cause__)}" if error.__cause__ is not None else ""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text[: 300 - min(len(cause), 200)]}{cause[:200]}"


def attempted(action: Callable[..., object], *args: Any) -> tuple[Any, str]:
    """Returns what `action` returns and an empty text; if it was refused, None and why, in one line."""
    try:
        return action(*args), ""
    except Exception as error:  # Whatever the bridge raises is the answer.
        return None, one_line(error)


def refusal(action: Callable[..., object], *args: Any) -> str:
    """Returns in one line why `action` was refused; empty if it was not."""
    return attempted(action, *args)[1]


def graph(number: int) -> Run:
    """Returns graph `number`. All graphs differ. Graph 0 is a single operator."""
    if not number:
        return lambda x, _: x * 0.5

    def run(x: Any, w: Any) -> Any:
        y = x @ w
        for _ in range(number):
            y = (y * 0.5).relu() + 1.0
        return y.sum(-1, keepdim=True) * y

    return run


def probe_command(*words: str) -> list[str]:
    """Returns the command of a probe that ends with this process. `words`: its name, its arguments in JSON, RESULT."""
    return python_command("aotgaudi.doctor.hpu.bridge", *words, str(os.getpid()))


def main() -> None:
    """Runs a probe. Writes what it returns, or each of its findings at once, to the file RESULT. See `probe_command`."""
    name, arguments, result, parent = sys.argv[1:]
    # A probe is in a group of its own. If doctor is killed, or stopped before it knows it, it would keep the card.
    die_with_parent(int(parent), signal.SIGKILL)
    module, _, function = name.partition(".")
    values: dict[str, Any] = {}

    def tell(problem: str = "") -> None:
        document = {"values": values, "problem": problem}
        Path(result).write_text(json.dumps(document), encoding="utf-8")

    try:
        probe = getattr(importlib.import_module(f"aotgaudi.doctor.hpu.{module}"), function)
        found = probe(Bridge(), **json.loads(arguments))
        if isinstance(found, Mapping):
            values.update(found)
        else:
            for finding in found:
                values.setdefault("findings", []).append(astuple(finding))
                tell()
        tell()
    except Exception as error:  # The edge of the process: the parent reports it.
        tell(one_line(error))
