"""Streaming text equals text: whatever the tokens are, and wherever they cut characters and stop strings."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aotgaudi.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopChecker

CORPUS = [
    "the cat sat on the mat",
    "größer als über",
    "日本語の文字、漢字",
    "😀😁👩‍👩‍👧 emoji",
    "naïve café — déjà vu",
]


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _metaspace_bpe() -> Tokenizer:
    """As Llama 2: spaces are part of words, characters that are not in the vocabulary fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2] * 4, trainer)
    return tokenizer


BYTE_LEVEL, METASPACE = _byte_level_bpe(), _metaspace_bpe()


def _decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def _stream(decode: Callable[[list[int]], str], ids: list[int], context: list[int]) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(decode, context)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@given(st.text().map(lambda text: list(text.encode())), st.text(max_size=8))
def test_no_half_character_leaves_a_byte_level_stream(ids: list[int], context: str) -> None:
    pieces, rest = _stream(_decode_bytes, ids, list(context.encode()))

    assert "".join(pieces) + rest == bytes(ids).decode()
    assert rest == "" or rest.startswith(REPLACEMENT)
    assert all(REPLACEMENT not in piece or REPLACEMENT in bytes(ids).decode() for piece in pieces)


@given(st.binary(max_size=60))
def test_any_bytes_at_all_give_the_text_of_the_whole(data: bytes) -> None:
    pieces, rest = _stream(_decode_bytes, list(data), [])

    assert "".join(pieces) + rest == data.decode(errors="replace")


@given(st.lists(st.sampled_from([b"\x80", b"\xe2", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"a"])))
def test_tokens_of_several_bytes_that_cut_characters_anywhere(tokens: list[bytes]) -> None:
    def decode(ids: list[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    pieces, rest = _stream(decode, list(range(len(tokens))), [])

    assert "".join(pieces) + rest == b"".join(tokens).decode(errors="replace")


@given(st.text(), st.text(max_size=8))
def test_a_byte_level_bpe_gives_its_text_back(text: str, context: str) -> None:
    ids, context_ids = BYTE_LEVEL.encode(text).ids, BYTE_LEVEL.encode(context).ids

    pieces, rest = _stream(BYTE_LEVEL.decode, ids, context_ids)

    assert "".join(pieces) + rest == text


@given(st.lists(st.integers(0, 319), max_size=60))
def test_any_tokens_of_a_byte_level_bpe_give_the_text_of_the_whole(ids: list[int]) -> None:
    pieces, rest = _stream(BYTE_LEVEL.decode, ids, [])

    assert "".join(pieces) + rest == BYTE_LEVEL.decode(ids)


@given(st.text(st.sampled_from("thecat oß日😀"), max_size=30), st.text(st.sampled_from("th e"), max_size=8))
def test_a_byte_fallback_bpe_gives_its_text_as_a_continuation(text: str, context: str) -> None:
    ids, context_ids = METASPACE.encode(text).ids, METASPACE.encode(context).ids

    pieces, rest = _stream(METASPACE.decode, ids, context_ids)

    whole = METASPACE.decode([*context_ids[-6:], *ids])
    assert "".join(pieces) + rest == whole[len(METASPACE.decode(context_ids[-6:])) :]


@given(st.one_of(st.binary(min_size=300, max_size=400), st.text("a€😀", min_size=100).map(str.encode)))
def test_the_cost_of_a_token_does_not_grow(data: bytes) -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return _decode_bytes(ids)

    _stream(decode, list(data), [])

    assert max(sizes) <= 24
    assert sum(sizes) <= 64 * len(data)


@st.composite
def _cut_texts(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text("abc", max_size=4), max_size=12))


@given(_cut_texts(), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_a_text_is_cut_at_the_stop_that_is_complete_first(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    ends = [(i, -len(s), s) for i in range(len(text) + 1) for s in stops if text[:i].endswith(s)]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    checker = StopChecker(stops)

    shown = ""
    for piece in pieces:
        shown += checker.push(piece)
        assert expected.startswith(shown)
    shown += checker.flush()

    assert shown == expected
    assert checker.is_stopped is bool(ends)


@given(_cut_texts(), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_only_the_possible_start_of_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    received = shown = ""

    for piece in pieces:
        received += piece
        shown += checker.push(piece)
        held = received[len(shown) :]
        assert checker.is_stopped or not held or any(stop.startswith(held) for stop in stops)
