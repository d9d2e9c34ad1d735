"""What a warm start of a guest must show: learnt in the proof run, sealed in the receipt, held against every start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt

from aotgaudi.document import Value


class Expected(Value):
    """What a warm start shows. Every number is exact.

    Attributes:
        loads: Artifact (``aot:NAME``) -> how often it is loaded, over all processes, until the guest is ready.
        counters: The guest's own counters -> their sum over all processes when it is ready. What must not happen is listed
            with 0.
        roles: Role -> how many processes of it must have a witness.
        hooks: What must be hooked in each process of those roles.
        answers: The sha256 (64 hex digits) of each answer to the exercise, in its order; empty where it is not compared.
    """

    loads: dict[str, PositiveInt] = Field(default_factory=dict)
    counters: dict[str, NonNegativeInt] = Field(default_factory=dict)
    roles: dict[str, PositiveInt] = Field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


def learnt(
    events: Iterable[Mapping[str, JsonValue]],
    *,
    roles: Mapping[str, int],
    hooks: tuple[str, ...],
    counted: Sequence[str],
    zeros: Sequence[str],
) -> Expected:
    """Returns what the events of a proof run teach.

    Args:
        events: of all processes; of one process in their order.
        roles: what must have a witness.
        hooks: what must be hooked.
        counted: the guest's counters that must be what they were; those that stayed at 0 are left out.
        zeros: those that must be 0.
    """
    loads: Counter[str] = Counter()
    last: dict[tuple[JsonValue, str], int] = {}
    for event in events:
        if event.get("e") == "loaded":
            loads[f"{event.get('what')}:{event.get('name')}"] += 1
        values = event.get("values")
        if event.get("e") == "counters" and isinstance(values, dict):
            last.update({(event.get("pid"), n): v for n, v in values.items() if isinstance(v, int)})
    sums: Counter[str] = Counter()
    for (_, name), value in last.items():
        if name in counted:
            sums[name] += value
    counters = {**dict.fromkeys(zeros, 0), **{name: value for name, value in sums.items() if value}}
    return Expected(loads=dict(loads), counters=counters, roles=dict(roles), hooks=hooks)
