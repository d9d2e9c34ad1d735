"""The number of KV blocks: pinned, from one of three places; never from what happens to be free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aotgaudi.bucketing.rules import EnvironmentRules
from aotgaudi.errors import SpecError
from aotgaudi.vllm.command import VllmCommand
from aotgaudi.vllm.memory import num_kv_blocks
from aotgaudi.vllm.serving import DEFAULT_RESERVED, RESERVED_VARIABLE, ServingEnvironment
from aotgaudi.vllm.values import parse_fraction, parse_integer

DEFAULT_UTILIZATION = 0.9
"""vllm/config/cache.py, and vllm-gaudi's docs/configuration/warm-up/warm-up.md."""

_OVERRIDE = "num-gpu-blocks-override"
_UTILIZATION = "gpu-memory-utilization"


@dataclass(frozen=True, slots=True)
class Pin:
    """Where the number of KV blocks is from: the number itself, or free device memory in bytes; both may be None."""

    num_blocks: int | None = None
    free_bytes: int | None = None


def pinned_blocks(
    pin: Pin,
    command: VllmCommand,
    rules: EnvironmentRules,
    serving: ServingEnvironment,
    block_bytes: Callable[[], int],
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of KV blocks, and where it is from; `block_bytes` is asked only where it is needed.

    A number in `pin` comes before --num-gpu-blocks-override, and that before free memory.

    Raises:
        SpecError: it is pinned nowhere, with the ways to do it; or no block fits.
    """
    text = command.values.get(_OVERRIDE)
    override = None if text is None else parse_integer(f"--{_OVERRIDE}", text, minimum=1)
    if pin.num_blocks is not None:
        notes = (f"{pin.num_blocks} KV blocks, from --num-blocks", *_serve_with(pin.num_blocks, override))
        return pin.num_blocks, (*notes, *_without_effect(command, serving))
    if override is not None:
        return override, (f"{override} KV blocks, from --{_OVERRIDE}", *_without_effect(command, serving))
    if pin.free_bytes is None:
        raise SpecError(
            "the number of KV blocks",
            "is not pinned: upstream takes it from the memory that is free, so that two starts may differ",
            f"--{_OVERRIDE} N in the vLLM command, --num-blocks N, or --free-memory 92GiB as upstream's log shows",
        )
    return _counted(pin.free_bytes, command, rules, serving, block_bytes())


def _counted(
    free_bytes: int,
    command: VllmCommand,
    rules: EnvironmentRules,
    serving: ServingEnvironment,
    block_bytes: int,
) -> tuple[int, tuple[str, ...]]:
    share = _utilization(command)
    share = DEFAULT_UTILIZATION if share is None else share
    reserved = DEFAULT_RESERVED if serving.reserved is None else serving.reserved
    reserved = 0.0 if command.switches.get("enforce-eager", False) else reserved
    blocks = num_kv_blocks(
        free_bytes, share, reserved, block_bytes, num_dummy_blocks=int(rules.has_dummy_block)
    )
    dummy = ", less one for padding" if rules.has_dummy_block else ""
    figures = (
        f"{free_bytes} bytes free * {share} usable * {1 - reserved:g} not for graphs"
        f" / {block_bytes} a block{dummy}"
    )
    if blocks < 1:
        raise SpecError("--free-memory", f"leaves room for no KV block: {figures}", "more, or --num-blocks N")
    return blocks, (f"{blocks} KV blocks: {figures}", *_serve_with(blocks, None))


def _utilization(command: VllmCommand) -> float | None:
    text = command.values.get(_UTILIZATION)
    if text is None:
        return None
    return parse_fraction(f"--{_UTILIZATION}", text, includes_zero=False, includes_one=True)


def _serve_with(num_blocks: int, override: int | None) -> Iterator[str]:
    if num_blocks != override:
        yield f"add --{_OVERRIDE} {num_blocks} to the vLLM command: otherwise it counts its own"


def _without_effect(command: VllmCommand, serving: ServingEnvironment) -> Iterator[str]:
    given = [f"--{_UTILIZATION}"] if _utilization(command) is not None else []
    given += [RESERVED_VARIABLE] if serving.reserved is not None else []
    if given:
        yield f"{' and '.join(given)}: no effect, as the number of KV blocks is given"
