from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import SpecError
from aotgaudi.llm.tokenizer import Tokenizer, special_tokens


def test_special_tokens_are_added_and_left_out(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)

    with_bos, without = tokenizer.encode("hi", True), tokenizer.encode("hi", False)

    assert with_bos == [256, *without]
    assert tokenizer.decode(with_bos) == "hi"
    assert tokenizer.max_token_chars == len("</s>")


@given(text=st.text())
def test_decode_undoes_encode(backend: tokenizers.Tokenizer, text: str) -> None:
    tokenizer = Tokenizer(backend)

    if "<s>" not in text and "</s>" not in text:
        assert tokenizer.decode(tokenizer.encode(text, True)) == text


def test_half_a_character_is_a_replacement_character(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)

    assert tokenizer.decode(tokenizer.encode("é", False)[:1]) == "\ufffd"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, backend: tokenizers.Tokenizer) -> None:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.enable_truncation(2)
    copy.enable_padding(length=9)
    copy.save(str(tmp_path / "tokenizer.json"))

    assert len(Tokenizer.load(ModelDirectory(tmp_path)).encode("abcd", False)) == 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config.json": {"eos_token_id": 5}}, {5}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6, 7]}}, {6, 7}),
        ({"config.json": {"eos_token_id": 5}, "tokenizer_config.json": {"eos_token": "</s>"}}, {5, 257}),
        ({"special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, {257}),
    ],
)
def test_eos_ids_come_from_the_configuration(
    tmp_path: Path, backend: tokenizers.Tokenizer, files: dict[str, object], expected: set[int]
) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))

    assert Tokenizer.load(ModelDirectory(tmp_path)).eos_token_ids == expected


def test_missing_and_broken_files_are_spec_errors(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"tokenizer\.json: is missing"):
        Tokenizer.load(ModelDirectory(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecError, match="not a usable tokenizer"):
        Tokenizer.load(ModelDirectory(tmp_path))


def test_tokenizer_config_wins_over_the_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "a", "pad_token": "p"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "b", "eos_token": null}')

    assert special_tokens(ModelDirectory(tmp_path)) == {"bos_token": "b", "pad_token": "p"}
