"""Masks of constraints: a bit for each token that may come next."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.constraints import Constraint, ConstraintMaker, MaskMaker, mask_bytes
from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
from aotgaudi.errors import RequestError

VOCAB, EOS = 70, 3
ANY = frozenset(range(VOCAB))
CHOICE = StructuredOutputs(choice=("x",))


class Spelled:
    """A matcher of one sequence of tokens, which EOS ends."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.left = [*token_ids, EOS]
        self.num_masks = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        if self.left[: len(token_ids)] != list(token_ids):
            raise RequestError("not this")
        del self.left[: len(token_ids)]

    def mask(self) -> bytes:
        self.num_masks += 1
        return (1 << self.left[0] | 1 << VOCAB).to_bytes(16, "little")


class Compiled:
    """Grammars that all allow `token_ids`."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def compile(self, outputs: StructuredOutputs) -> Spelled:
        return Spelled(self.token_ids)


def encode(text: str) -> list[int]:
    """A token a letter; a space is token 60."""
    return [60 if letter == " " else ord(letter) - ord("a") for letter in text]


def constraint_of(params: SamplingParams, token_ids: list[int], *grammar: int) -> Constraint:
    made = ConstraintMaker(VOCAB, {EOS}, encode, Compiled(*grammar)).make(params, token_ids)
    assert made is not None
    return made


def allowed(constraint: Constraint) -> set[int]:
    mask = constraint.mask()
    assert len(mask) == mask_bytes(VOCAB) == 12
    return {token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1}


def test_a_request_without_constraints_has_none() -> None:
    maker = ConstraintMaker(VOCAB, {EOS}, encode, Compiled())

    assert maker.make(SamplingParams(), [1]) is None
    assert maker.make(SamplingParams(min_tokens=3, ignore_eos=True), [1]) is None


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_allowed_tokens_are_allowed_and_no_others(token_ids: list[int]) -> None:
    constraint = constraint_of(SamplingParams(allowed_token_ids=tuple(token_ids)), [1])

    assert allowed(constraint) == set(token_ids)


@given(st.integers(1, 5), st.integers(0, 7), st.booleans())
def test_nothing_ends_the_output_before_its_least_length(
    min_tokens: int, num_output: int, ignore_eos: bool
) -> None:
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=(9,), ignore_eos=ignore_eos)
    token_ids = [1, 2]
    constraint = constraint_of(params, token_ids)

    token_ids += [5] * num_output

    forbidden = {9} if ignore_eos else {9, EOS}
    assert allowed(constraint) == (ANY - forbidden if num_output < min_tokens else ANY)


def test_a_bad_word_is_never_completed_with_or_without_a_space_before_it() -> None:
    token_ids = encode("ab")  # The prompt does not count.
    constraint = constraint_of(SamplingParams(bad_words=("abc", "d")), token_ids)
    d, c = encode("dc")
    seen = [allowed(constraint)]

    for letter in "ab":
        token_ids += encode(letter)
        seen.append(allowed(constraint))
    token_ids += encode("x ")
    seen.append(allowed(constraint))

    assert seen == [ANY - {d}, ANY - {d}, ANY - {d, c}, ANY - {d}]


def test_a_grammar_decides_until_it_ends() -> None:
    token_ids = [1]
    constraint = constraint_of(SamplingParams(structured_outputs=CHOICE), token_ids, 10, 11)
    seen = [allowed(constraint)]

    for token_id in (10, 11):
        token_ids.append(token_id)
        seen.append(allowed(constraint))

    assert seen == [{10}, {11}, {EOS}]


def test_a_grammar_that_has_ended_ends_the_output_whatever_its_least_length() -> None:
    params = SamplingParams(structured_outputs=CHOICE, min_tokens=5, bad_words=("k",), max_tokens=9)
    token_ids = [1]
    constraint = constraint_of(params, token_ids, 10)
    assert allowed(constraint) == {10}  # Though it is the bad word.

    token_ids.append(10)

    assert allowed(constraint) == {EOS}


def test_what_no_token_satisfies_is_refused() -> None:
    params = SamplingParams(structured_outputs=CHOICE, allowed_token_ids=(12,))

    with pytest.raises(RequestError, match="No token of allowed_token_ids") as refused:
        constraint_of(params, [1], 10)

    assert refused.value.param == "allowed_token_ids"


def test_a_grammar_that_fails_later_fails_when_its_mask_is_asked_for() -> None:
    token_ids = [1]
    constraint = constraint_of(SamplingParams(structured_outputs=CHOICE), token_ids, 10)
    token_ids.append(11)

    constraint.make()

    with pytest.raises(RequestError, match="not this"):
        constraint.mask()


def test_a_mask_is_made_once_for_each_token() -> None:
    token_ids, matcher = [1], Spelled([10, 11])
    constraint = Constraint(SamplingParams(structured_outputs=CHOICE), token_ids, VOCAB, matcher=matcher)

    for _ in range(3):
        constraint.mask()
    token_ids.append(10)
    constraint.mask()

    assert matcher.num_masks == 2


def test_several_new_tokens_are_taken_at_once() -> None:
    token_ids = [1]
    constraint = constraint_of(SamplingParams(structured_outputs=CHOICE), token_ids, 10, 11, 12)

    token_ids += [10, 11]

    assert allowed(constraint) == {12}


def test_masks_are_made_on_another_thread_until_they_are_wanted() -> None:
    names: list[str] = []

    class Noted(Spelled):
        def mask(self) -> bytes:
            names.append(threading.current_thread().name)
            return super().mask()

    masks = MaskMaker()
    constraints = [
        Constraint(SamplingParams(structured_outputs=CHOICE), [1], VOCAB, matcher=Noted([n])) for n in (5, 6)
    ]

    masks.begin(constraints)
    masks.finish()

    assert [allowed(constraint) for constraint in constraints] == [{5}, {6}]
    assert names == ["aotgaudi-masks_0"] * 2


def test_there_is_nothing_to_wait_for_without_constraints() -> None:
    masks, num_threads = MaskMaker(), threading.active_count()

    masks.begin([])
    masks.finish()

    assert threading.active_count() <= num_threads
