"""Passwords for registries: where they are found, and for which host."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.share.credentials import Credentials, Login, is_same_registry


def basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def config(folder: Path, **sections: object) -> Credentials:
    path = folder / "config.json"
    path.write_text(json.dumps(sections))
    return Credentials(config_files=(folder / "none.json", path))


def helper(folder: Path, name: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential helper on the path, which notes what it is asked and prints `answer`."""
    program = folder / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\ncat > {folder}/asked\nprintf '%s' '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_password_is_for_its_host_and_port_alone() -> None:
    credentials = Credentials((Login("a.b:5000", "me", "secret"),))

    assert credentials.basic("a.b:5000") == f"Basic {basic('me', 'secret')}"
    for host in ("a.b", "a.b:5001", "c.a.b:5000", "A.b:5000.evil"):
        assert credentials.basic(host) is None
        assert not credentials.may_see(host, "a.b:5000")
    assert "secret" not in repr(credentials)


@pytest.mark.parametrize("key", ["a.b", "https://a.b", "https://a.b/v1/", "http://a.b/v2"])
def test_docker_s_file_names_hosts_and_urls(tmp_path: Path, key: str) -> None:
    credentials = config(tmp_path, auths={"x.y": {"auth": basic("no", "no")}, key: {"auth": basic("u", "p")}})

    assert credentials.basic("a.b") == f"Basic {basic('u', 'p')}"
    assert credentials.basic("z.a.b") is None


def test_docker_hub_is_one_registry_of_several_names(tmp_path: Path) -> None:
    credentials = config(tmp_path, auths={"https://index.docker.io/v1/": {"auth": basic("u", "p")}})

    assert credentials.basic("registry-1.docker.io") == f"Basic {basic('u', 'p')}"
    assert credentials.may_see("auth.docker.io", "docker.io")
    assert not is_same_registry("docker.io", "docker.io.evil.example")


def test_a_caller_s_login_comes_before_the_files(tmp_path: Path) -> None:
    found = config(tmp_path, auths={"a.b": {"auth": basic("file", "p")}})

    credentials = Credentials((Login("a.b", "caller", "p"),), found.config_files)

    assert credentials.basic("a.b") == f"Basic {basic('caller', 'p')}"


@pytest.mark.parametrize("sections", [{"credHelpers": {"a.b": "mine"}}, {"credsStore": "mine"}])
def test_a_helper_is_asked_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, object]
) -> None:
    helper(tmp_path, "mine", '{"Username": "u", "Secret": "p"}', monkeypatch)

    assert config(tmp_path, auths={"a.b": {}}, **sections).basic("a.b") == f"Basic {basic('u', 'p')}"
    assert (tmp_path / "asked").read_text() == "a.b"


@pytest.mark.parametrize(
    "answer", ["", "[]", "no such entry", '{"Username": "<token>", "Secret": "refresh"}']
)
def test_a_helper_without_a_password_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    helper(tmp_path, "mine", answer, monkeypatch)

    assert config(tmp_path, credsStore="mine").basic("a.b") is None
    assert config(tmp_path, credsStore="none").basic("a.b") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"auths": {"a.b": {"auth": "%%%"}}}'])
def test_a_file_that_cannot_be_read_is_named_and_its_content_is_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(SpecError, match=str(path)) as caught:
        Credentials(config_files=(path,)).basic("a.b")
    assert "%%%" not in str(caught.value)


@pytest.mark.parametrize("auths", [[], {"a.b": None}, {"a.b": {"auth": 1}}, {"a.b": {"identitytoken": "x"}}])
def test_sections_of_another_shape_hold_no_password(tmp_path: Path, auths: object) -> None:
    assert config(tmp_path, auths=auths).basic("a.b") is None
