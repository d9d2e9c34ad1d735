from __future__ import annotations

from aotgaudi.engine.interleaving import StepCosts
from aotgaudi.entries import DecodeEntry, PromptEntry

DECODE = DecodeEntry(4, 1, 8)


def test_an_estimate_is_the_least_of_the_last_samples() -> None:
    costs = StepCosts()
    assert costs.seconds(DECODE) is None

    for seconds in (0.1, 5.0, 2.0):
        costs.observe(DECODE, seconds)
    assert costs.seconds(DECODE) == 0.1

    for _ in range(8):
        costs.observe(DECODE, 3.0)
    assert costs.seconds(DECODE) == 3.0


def test_a_prompt_entry_that_never_ran_is_taken_for_the_one_of_the_nearest_context() -> None:
    costs = StepCosts()
    for context, seconds in ((0, 1.0), (4, 2.0), (16, 3.0)):
        costs.observe(PromptEntry(1, 32, context), seconds)

    assert costs.seconds(PromptEntry(1, 32, 5)) == 2.0
    assert costs.seconds(PromptEntry(1, 32, 100)) == 3.0
    assert costs.seconds(PromptEntry(1, 64, 4)) is None
    assert costs.seconds(PromptEntry(2, 32, 4)) is None
    assert costs.seconds(DecodeEntry(1, 1, 1)) is None


def test_what_was_seen_long_ago_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(PromptEntry(1, 32, 0), 1.0)

    for _ in range(4096):
        costs.observe(DECODE, 1.0)

    assert costs.seconds(PromptEntry(1, 32, 0)) is None
    assert costs.seconds(PromptEntry(1, 32, 4)) is None
