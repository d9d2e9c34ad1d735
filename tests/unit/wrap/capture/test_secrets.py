"""Secrets: found by the names of variables and flags, and in every form in which programs write text down."""

from __future__ import annotations

import base64
import json
import pickle
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import CaptureError
from aotgaudi.wrap.collect import MIN_SECRET_BYTES, Secret, require_public, secrets_of

VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=14, max_size=40)
FORMS: dict[str, Callable[[str], bytes]] = {
    "plain": lambda value: value.encode(),
    "JSON": lambda value: json.dumps({"token": value}).encode(),
    "JSON in UTF-8": lambda value: json.dumps([value], ensure_ascii=False).encode(),
    "Python": lambda value: f"TOKEN = {value!r}\n".encode(),
    "pickle": lambda value: pickle.dumps({"token": value}),
    "URL": lambda value: f"https://x/?token={urllib.parse.quote(value, safe='')}".encode(),
    "base64": lambda value: base64.b64encode(value.encode()),
    "base64 within text": lambda value: base64.b64encode(b"user:" + value.encode() + b"\n"),
    "base64 of a URL": lambda value: base64.urlsafe_b64encode(b"x" + value.encode()),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(value=VALUES)
def test_a_secret_is_found_in_every_form(form: Callable[[str], bytes], value: str) -> None:
    data = b"before " + form(value) + b" after"

    assert any(needle in data for needle in Secret("HF_TOKEN", value).forms())


def test_a_value_is_never_shown() -> None:
    assert "hunter2hunter2" not in repr(Secret("HF_TOKEN", "hunter2hunter2"))


def test_what_is_short_is_told_from_chance_by_nobody() -> None:
    assert not Secret("HF_TOKEN", "x" * (MIN_SECRET_BYTES - 1)).is_searched
    assert Secret("HF_TOKEN", "x" * MIN_SECRET_BYTES).is_searched


def test_variables_count_by_their_names() -> None:
    environ = {
        "HF_TOKEN": "hf_abcdef",
        "AWS_SECRET_ACCESS_KEY": "wJalr",
        "PATH": "/usr/bin",
        "VLLM_API_KEY": "",
    }

    assert {secret.name: secret.value for secret in secrets_of(environ, (), ())} == {
        "HF_TOKEN": "hf_abcdef",
        "AWS_SECRET_ACCESS_KEY": "wJalr",
    }


@pytest.mark.parametrize(
    ("words", "public", "value"),
    [
        (("vllm", "serve", "M", "--api-key", "topsecret"), ("vllm", "serve", "M"), "topsecret"),
        (("vllm", "serve", "M", "--api-key=topsecret"), ("vllm", "serve", "M"), "topsecret"),
        (("env", "HF_TOKEN=topsecret", "vllm", "serve"), ("env", "vllm", "serve"), "topsecret"),
        (
            ("vllm", "--model-loader-extra-config", '{"auth_token": "topsecret", "x": 1}'),
            ("vllm", "--model-loader-extra-config", '{"x":1}'),
            "topsecret",
        ),
    ],
)
def test_words_that_are_not_for_everybody_count(
    words: tuple[str, ...], public: tuple[str, ...], value: str
) -> None:
    assert value in {secret.value for secret in secrets_of({}, words, public)}


def test_a_command_without_secrets_has_none() -> None:
    words = ("vllm", "serve", "M", "--max-model-len", "512")

    assert secrets_of({}, words, words) == ()


def test_a_document_that_holds_a_secret_is_not_sealed() -> None:
    secrets = (
        Secret("HF_TOKEN", "hf_abcdefgh"),
        Secret("SHORT_KEY", "abc"),
        Secret("OTHER_KEY", "not there"),
    )

    require_public(b'{"words": ["abc"]}', "launch", secrets)
    with pytest.raises(CaptureError, match="the receipt holds the value of HF_TOKEN, a secret") as error:
        require_public(b'{"factors": {"VLLM_X": "hf_abcdefgh"}}', "receipt", secrets)
    assert "hf_abcdefgh" not in str(error.value)
