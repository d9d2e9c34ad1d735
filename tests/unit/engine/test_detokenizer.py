from __future__ import annotations

import pytest

from aotgaudi.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopChecker


def _decode_bytes(ids: list[int]) -> str:
    """A byte-level tokenizer; ids from 256 on are special tokens, which are skipped."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


WORDS = ["▁a", "b", "▁", "▁cd"]


def _decode_words(ids: list[int]) -> str:
    """A sentencepiece-like tokenizer: a space at the start of the text is dropped."""
    return "".join(WORDS[i] for i in ids).replace("▁", " ").removeprefix(" ")


class TestIncrementalDetokenizer:
    def test_half_a_character_is_held_back(self) -> None:
        detokenizer = IncrementalDetokenizer(_decode_bytes)

        assert [detokenizer.push(byte) for byte in "a€😀".encode()] == ["a", "", "", "€", "", "", "", "😀"]
        assert detokenizer.flush() == ""

    def test_flush_gives_what_is_left(self) -> None:
        detokenizer = IncrementalDetokenizer(_decode_bytes)
        detokenizer.push(ord("a"))
        detokenizer.push("€".encode()[0])

        assert detokenizer.flush() == REPLACEMENT

    def test_flush_of_nothing_is_empty(self) -> None:
        assert IncrementalDetokenizer(_decode_bytes, b"abc").flush() == ""

    def test_spaces_between_words_stay(self) -> None:
        detokenizer = IncrementalDetokenizer(_decode_words)

        assert [detokenizer.push(i) for i in (0, 1, 3, 2, 0)] == ["a", "b", " cd", " ", " a"]

    def test_the_context_keeps_the_first_space(self) -> None:
        assert IncrementalDetokenizer(_decode_words, [0, 1]).push(3) == " cd"
        assert IncrementalDetokenizer(_decode_words, []).push(3) == "cd"

    def test_a_context_that_ends_inside_a_character_is_not_used(self) -> None:
        detokenizer = IncrementalDetokenizer(_decode_bytes, "a€".encode()[:-1])

        assert detokenizer.push(ord("b")) == "b"

    def test_invisible_tokens_give_nothing_and_cost_nothing(self) -> None:
        sizes: list[int] = []

        def decode(ids: list[int]) -> str:
            sizes.append(len(ids))
            return _decode_bytes(ids)

        detokenizer = IncrementalDetokenizer(decode)
        assert detokenizer.push(ord("a")) == "a"
        assert [detokenizer.push(300) for _ in range(100)] == [""] * 100
        assert detokenizer.push(ord("b")) == "b"
        assert max(sizes) < 5

    @pytest.mark.parametrize("garbage", [b"\x80", b"\xff", b"\xe2", b"\xe2\x82", b"\xf0\x9f\x98"])
    def test_garbage_without_end_is_let_go_of(self, garbage: bytes) -> None:
        sizes: list[int] = []

        def decode(ids: list[int]) -> str:
            sizes.append(len(ids))
            return _decode_bytes(ids)

        detokenizer = IncrementalDetokenizer(decode)
        text = "".join(detokenizer.push(byte) for _ in range(1000) for byte in garbage)

        assert len(text) > 980
        assert text + detokenizer.flush() == (garbage * 1000).decode(errors="replace")
        assert max(sizes) < 20


def test_flush_returns_the_start_of_a_stop_that_did_not_come_once() -> None:
    checker = StopChecker(["END"])
    checker.push("an EN")

    assert checker.flush() == "EN"
    assert checker.flush() == ""
