"""The card of this process: how it is acquired, and what runs on it.

A process has one card, and acquires it once (K-25). All of its environment must be set before torch is imported (K-01).
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from typing import Any

import torch
from torch import Tensor

from aotgaudi.backends.base import Target
from aotgaudi.errors import CardError, TargetError
from aotgaudi.gaudi.counters import Counters, Counts
from aotgaudi.gaudi.environment import ABSENT, BUSY, CARD_VARIABLES, recipe_directory
from aotgaudi.gaudi.identity import device_type_of
from aotgaudi.gaudi.recipes import flush_recipes
from aotgaudi.machine import LateError, Memory, within

DEVICE = "hpu"
PATIENCE_SECONDS = 30.0
"""How long a card may stay busy after the process that had it was killed."""

_RETRY_SECONDS = 1.0
_ANSWER_SECONDS = 120.0
"""How long acquiring a card may take where the driver does answer, beside other processes that do so. A guess."""
_PACKAGE = "habana_frameworks.torch"


class Card:
    """An acquired card.

    Attributes:
        device_type: ``gaudi2``, say; as named by the bridge where we do not know the name.
        synapse: V: the version in the names of recipes.
        counters: What the bridge counts in this process.
    """

    def __init__(self, patience_seconds: float) -> None:
        """Imports the bridge if ``import torch`` has not, and acquires the card.

        Raises TargetError where there is none, or where another process keeps it.
        """
        if not hasattr(torch, DEVICE):
            _module("")
        name = _acquired(patience_seconds)
        self.device_type = str(device_type_of(name) or name)
        self.synapse = str(_hpu().get_device_capability())
        self._debug = _module("utils.debug")
        self.counters = Counters(_module("hpu.metrics"), getattr(self._debug, "_get_jit_cache_size", None))
        core = _module("core")
        core.import_compilers()
        core.import_hpu_partition()

    def require(self, target: Target) -> None:
        """Raises TargetError, naming the component, unless recipes of `target` would be found and run on this card."""
        for component, wanted, found in (
            ("machine", target.machine, self.device_type),
            ("toolchain.synapse", target.toolchain["synapse"], self.synapse),
        ):
            if wanted != found:
                raise TargetError(f"target.{component}: compiled for {wanted}, this card has {found}")

    def counts(self) -> Counts:
        """Returns what was counted so far, after all work has finished."""
        synchronize()
        return self.counters.read()

    def flush(self) -> None:
        """Waits until every recipe is stored."""
        flush_recipes(self._debug, recipe_directory())

    def memory(self) -> Memory:
        """Returns the card's memory."""
        free, total = _hpu().mem_get_info()
        return Memory(int(total), int(free))


def acquired_to_compile() -> Card:
    """Returns the card of a process that compiles. Raises CardError where it cannot be acquired."""
    try:
        return acquired()
    except TargetError as error:
        raise CardError(str(error)) from error


@functools.cache
def acquired(patience_seconds: float = PATIENCE_SECONDS) -> Card:
    """Returns the card of this process, which it acquires the first time."""
    return Card(patience_seconds)


def put(tensor: Tensor) -> Tensor:
    """Returns a tensor on the card: contiguous, in memory of its own."""
    return tensor if tensor.device.type == DEVICE else tensor.contiguous().to(DEVICE)


def synchronize() -> None:
    """Waits until all work on the card has finished."""
    _hpu().synchronize()


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined] # The bridge adds it.


def _module(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}" if name else _PACKAGE)


def _acquired(patience_seconds: float) -> str:
    """Acquires the card, which another process may have had a moment ago, and returns its name."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return _name()
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if ABSENT in text or BUSY not in text:
                raise TargetError(f"target: no card can be acquired: {text}") from error
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise TargetError(f"target: {_which()} is busy: another process has it ({text})") from error
        time.sleep(_RETRY_SECONDS)


def _name() -> str:
    """Returns the card's name; asking for it acquires the card. A thread asks, since a driver may never answer.

    Raises RuntimeError as the bridge does, and TargetError where there is no answer: then this process gets no card.
    """
    try:
        return within(_ANSWER_SECONDS, lambda: str(_hpu().get_device_name()))
    except LateError as error:
        raise TargetError(
            f"target: {_which()} does not answer: acquiring it took more than {_ANSWER_SECONDS:g} s (hl-smi; reset"
            " the card, or leave it out of HABANA_VISIBLE_MODULES)"
        ) from error


def one_line(error: BaseException) -> str:
    """Returns an error of the bridge, or what caused it, in one line."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"


def _which() -> str:
    module = next(filter(None, map(os.environ.get, CARD_VARIABLES)), None)
    return "every card" if module is None else f"the card with module id {module}"
