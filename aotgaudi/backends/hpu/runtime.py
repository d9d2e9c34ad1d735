"""Runs units from recipes on this process's card. Online: the graph compiler must never run here.

The bridge cannot be kept from compiling; what it compiles is counted (docs/adr/0023-hpu-backend.md). So all
programs run before anything is served, each unit must find its recipes then, and afterwards the count is watched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotgaudi.backends.base import Plan, RunPlan, Target
from aotgaudi.backends.hpu import card
from aotgaudi.backends.hpu.artifact import HpuUnit, read_unit
from aotgaudi.backends.hpu.frontend import Run, compiled
from aotgaudi.backends.hpu.process import on_card
from aotgaudi.digest import Digest
from aotgaudi.errors import AotGaudiError, TargetError
from aotgaudi.gaudi.counters import RECIPES, Counts, require_found
from aotgaudi.gaudi.environment import recipe_directory
from aotgaudi.gaudi.recipes import RecipeName, materialise, require_one_set
from aotgaudi.graphs.canonical import from_text
from aotgaudi.manifest.memory import MemoryNeed, sized

logger = logging.getLogger(__name__)


class HpuRuntime:
    """Loads units that were compiled for one target, on the card of this process. One thread."""

    def __init__(self, target: Target) -> None:
        """Acquires nothing yet: the bridge reads its directory of recipes when it acquires the card."""
        self._target = target
        self._placement: CardPlacement | None = None
        self._is_serving = False
        self._restored: dict[str, Digest] = {}
        self._start = Counts()

    @property
    def placement(self) -> CardPlacement:
        """The card's memory, once recipes are restored."""
        if self._placement is None:
            raise TargetError("target: the card is acquired once recipes are restored")
        return self._placement

    def restore(self, files: Iterable[tuple[str, Digest, Path]]) -> None:
        """Makes the directory of recipes, which nothing can write to, and acquires the card.

        If units bring a recipe in several forms, one answers for all: they are compilations of one graph.
        """
        chosen: dict[str, tuple[Digest, Path]] = {}
        for name, digest, path in sorted(files, key=lambda file: (file[0], str(file[1]))):
            if RecipeName.parse(name) is not None:
                chosen.setdefault(name, (digest, path))
        if self._placement is not None:
            if not chosen.keys() <= self._restored.keys():
                raise TargetError("target: recipes cannot be added to a server that runs")
            return
        self._restored = {name: digest for name, (digest, _) in chosen.items()}
        synapse = require_one_set(self._restored)
        materialise(chosen, recipe_directory())
        found = card.acquired()
        found.require(self._target)
        if synapse not in (None, found.synapse):
            raise TargetError(
                f"target.toolchain.synapse: recipes were compiled for {synapse}, this machine has {found.synapse}"
            )
        self._placement = CardPlacement(found)
        logger.info("%d recipes restored, card %s acquired", len(chosen) // 2, found.device_type)

    def load(self, files: Mapping[str, Path]) -> HpuExecutable:
        """Prepares the front end of a unit, which runs at the unit's first run."""
        text, unit = read_unit(files)
        graph, _ = from_text(text)
        return HpuExecutable(self, compiled(graph), unit)

    def prepare(self, layout: str, tensor: Tensor) -> Tensor:
        """Raises TargetError: units for a Gaudi take weights as they are stored."""
        raise TargetError(f"target: a unit takes a weight in the layout {layout!r}, which is not known here")

    def join(self, plan: Plan) -> RunPlan | None:
        """Returns None: a plan is run call by call."""
        return None

    def rehearse(self, runs: Mapping[str, Callable[[], object]]) -> None:
        """Runs every program twice; each unit must find its recipes. From then on compilations are counted.

        Raises TargetError, naming the program, where a recipe was not found, or anything was compiled.
        """
        counters, seconds = self.placement.card.counters, []
        for _ in range(2):
            began = time.monotonic()
            for label, run in runs.items():
                _run_first(label, run)
            seconds.append(time.monotonic() - began)
        logger.info(
            "every program has run twice, in %.1f s with the front end and in %.1f s without", *seconds
        )
        self._start = self.placement.card.counts()
        self._is_serving = True
        if counters.knows_recipes:
            logger.info("%d recipes found by the bridge, 0 compiled", len(self._start.hits))
        else:
            logger.info("0 graphs compiled; this bridge does not count recipes")
        counters.stop(RECIPES)  # Newer bridges queue its events until somebody asks.
        self.placement.require_headroom()

    def num_compiled(self) -> int:
        """Returns how many graphs and single operators the bridge has compiled since the rehearsal."""
        if not self._is_serving:
            return 0
        counts = self.placement.card.counters.read()
        return max(0, counts.compiled - self._start.compiled) + max(
            0, counts.eager_compiled - self._start.eager_compiled
        )

    def run_unit(self, unit: HpuUnit, run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs a unit. In the rehearsal it must find its recipes."""
        if self._is_serving:
            return run(inputs)
        before = self.placement.card.counts()
        outputs = run(inputs)
        counts = self.placement.card.counts().since(before)
        if not self.placement.card.counters.knows_recipes:
            if counts.compiled > len(unit.uncached):
                raise TargetError(f"target: {counts.compiled} graphs were compiled: keys changed")
        elif counts.misses.keys() - set(unit.uncached) or counts.compiled > sum(counts.misses.values()):
            require_found("a unit", unit.recipes, counts, unit.uncached)
        if counts.fallbacks:
            raise TargetError(f"target: {counts.fallbacks} operators fell back to the CPU")
        return outputs


def _run_first(label: str, run: Callable[[], object]) -> None:
    try:
        run()
    except TargetError as error:
        raise TargetError(f"{label}: {error}") from error
    except AotGaudiError:
        raise
    except Exception as error:  # The bridge's own errors have no common type.
        raise TargetError(f"target: {label} does not run: {card.one_line(error)}") from error


class HpuExecutable:
    """One unit."""

    def __init__(self, runtime: HpuRuntime, run: Run, unit: HpuUnit) -> None:
        self._runtime, self._run, self._unit = runtime, run, unit

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the unit on tensors of the card."""
        return self._runtime.run_unit(self._unit, self._run, inputs)


class CardPlacement:
    """The memory of a card. Nothing here compiles: tensors are made on the CPU and copied (K-17)."""

    def __init__(self, acquired: card.Card) -> None:
        self.card = acquired
        self._need: MemoryNeed | None = None

    def require(self, need: MemoryNeed) -> None:
        """Raises TargetError, with the figures, where weights and KV caches do not fit."""
        memory = self.card.memory()
        self._need = on_card(need, memory)
        self._need.require(memory, "the card")

    def require_headroom(self) -> None:
        """Raises TargetError where the programs, which have all run, left less than a quarter of what is reserved."""
        need, memory = self._need, self.card.memory()
        if need is None or memory.free_bytes >= (wanted := need.reserved_bytes // 4):
            return
        fitting = need.cache.blocks_in(memory.free_bytes - wanted + need.cache_bytes)
        raise TargetError(
            f"target: after every program has run, {sized(memory.free_bytes)} of {sized(memory.total_bytes)} are free, fewer"
            f" than {sized(wanted)}; weights take {sized(need.weights_bytes)}, {need.num_blocks:,} KV blocks"
            f" {sized(need.cache_bytes)}; {need.remedy(fitting)}"
        )

    def put(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the card."""
        return card.put(tensor)

    def get(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the CPU."""
        return tensor.cpu()

    def clear(self, cache: Tensor, blocks: Sequence[int], block_size: int) -> None:
        """Copies zeros over blocks of a cache with a row a slot."""
        zeros = torch.zeros(block_size, *cache.shape[1:], dtype=cache.dtype)
        for block in blocks:
            cache[block * block_size : (block + 1) * block_size].copy_(zeros)
