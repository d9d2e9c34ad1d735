"""Decides which tokens a request may get next. This is the host's side of a sampler graph's `token_mask`.

A mask depends only on the tokens that are known when a step begins. So a separate thread makes the masks while the step
computes logits, and the step waits for them only if they take longer. Bit i (from the lowest) of byte k belongs to token
8 k + i.

If the constraints together allow no token, `min_tokens` and `bad_words` are ignored: for example, a grammar that has ended
allows only the end of the sequence. The grammar and `allowed_token_ids` always hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
from aotgaudi.errors import RequestError


class Matcher(Protocol):
    """The position of a text in a grammar. One thread at a time."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that the masks have allowed. Raises RequestError if a limit of the grammar is reached."""
        ...

    def mask(self) -> bytes:
        """Returns a bit for each token, and possibly more bits. Allows an end of the sequence where the text may end.

        Raises:
            RequestError: The grammar is too complex to go on, or allows no token.
        """
        ...


class Grammars(Protocol):
    """Compiles grammars. Any thread may use it."""

    def compile(self, outputs: StructuredOutputs) -> Matcher:
        """Returns a matcher at the beginning of a text. May be slow. Raises RequestError."""
        ...


class Constraint:
    """The tokens that one request may get. Several threads may use it, but never two at the same time.

    Args:
        params: The request's parameters.
        token_ids: The request's own list of known tokens, prompt first, which grows.
        vocab_size: How many tokens there are.
        stop_token_ids: Tokens that end the output, which `min_tokens` forbids.
        bad_words: Sequences of tokens, the last of which must not follow the others.
        matcher: The matcher of the grammar for the whole output, if there is one.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        vocab_size: int,
        *,
        stop_token_ids: Collection[int] = (),
        bad_words: Collection[tuple[int, ...]] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.params = params
        self._token_ids, self._start = token_ids, len(token_ids)
        self._num_bytes = mask_bytes(vocab_size)
        self._stop_token_ids, self._bad_words, self._matcher = stop_token_ids, bad_words, matcher
        allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        self._allowed = _bits(allowed)
        self._num_taken = self._made_for = -1
        self._made: bytes | RequestError = b""

    def mask(self) -> bytes:
        """Returns the mask of the next token. Raises RequestError if no token is allowed or the grammar fails."""
        self.make()
        if isinstance(self._made, RequestError):
            raise self._made
        return self._made

    def make(self) -> None:
        """Makes the mask of the next token, unless it exists already."""
        num_tokens = len(self._token_ids)
        if self._made_for == num_tokens:
            return
        try:
            self._made = self._mask()
        except RequestError as error:
            self._made = error
        self._made_for = num_tokens

    def _mask(self) -> bytes:
        bits = self._allowed
        if self._matcher is not None:
            begin = max(self._num_taken, self._start)
            self._matcher.advance(self._token_ids[begin:])
            self._num_taken = len(self._token_ids)
            bits &= int.from_bytes(self._matcher.mask(), "little")
        if not bits:
            raise RequestError(
                "No token of allowed_token_ids can follow under structured_outputs", param="allowed_token_ids"
            )
        left = bits & ~_bits(self._forbidden())
        return (left or bits).to_bytes(self._num_bytes, "little")

    def _forbidden(self) -> Iterable[int]:
        """Yields the tokens that `min_tokens` and `bad_words` forbid now."""
        output = self._token_ids[self._start :]
        if len(output) < self.params.min_tokens:
            yield from self._stop_token_ids
        for *before, last in self._bad_words:
            if not before or list(output[-len(before) :]) == before:
                yield last


class ConstraintMaker:
    """Makes the constraints of a model's requests. Any thread may use it.

    Args:
        vocab_size: How many tokens the model's logits cover.
        eos_token_ids: Tokens that end a sequence.
        encode: Returns the tokens of a text, without special tokens.
        grammars: Compiles the grammars of structured output.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        encode: Callable[[str], Sequence[int]],
        grammars: Grammars,
    ) -> None:
        self._vocab_size, self._eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self._encode, self._grammars = encode, grammars

    def make(self, params: SamplingParams, token_ids: Sequence[int]) -> Constraint | None:
        """Returns the constraint of a request with these tokens; None if it needs none.

        Compiles the grammar, which may be slow, and makes the first mask.

        Raises:
            RequestError: The grammar cannot be used.
        """
        if not params.is_constrained:
            return None
        outputs = params.structured_outputs
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        constraint = Constraint(
            params,
            token_ids,
            self._vocab_size,
            stop_token_ids=eos_token_ids.union(params.stop_token_ids),
            bad_words=frozenset(self._sequences(params.bad_words)),
            matcher=None if outputs is None else self._grammars.compile(outputs),
        )
        constraint.mask()
        return constraint

    def _sequences(self, words: Iterable[str]) -> Iterable[tuple[int, ...]]:
        """Yields the tokens of each word, both at the beginning of a text and after a space."""
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                if token_ids := tuple(self._encode(text)):
                    yield token_ids


class MaskMaker:
    """Makes masks on a separate thread. One thread uses it, and calls `begin` and then `finish`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "aotgaudi-masks")
        self._begun: Future[None] | None = None

    def begin(self, constraints: Sequence[Constraint]) -> None:
        """Starts to make the next mask of each constraint."""
        self.finish()
        if constraints:
            self._begun = self._pool.submit(_make_all, constraints)

    def finish(self) -> None:
        """Waits until the masks are made."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()


def _make_all(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.make()


def mask_bytes(vocab_size: int) -> int:
    """Returns the size of a mask in bytes, rounded up to words of 32 bits."""
    return -(-vocab_size // 32) * 4


def _bits(token_ids: Iterable[int]) -> int:
    if isinstance(token_ids, range):
        return (1 << len(token_ids)) - 1
    ids = tuple(token_ids)
    mask = bytearray(max(ids, default=0) // 8 + 1)
    for token_id in ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(mask, "little")
