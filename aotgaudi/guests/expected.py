"""What a warm start of a guest must show: learnt in the proof run, sealed in the receipt, held against every start."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

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
