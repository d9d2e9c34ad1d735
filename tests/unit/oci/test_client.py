"""How a registry is authenticated with, and what never happens to a password."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import RemoteError
from aotgaudi.oci.client import Credentials, RegistryClient
from aotgaudi.oci.reference import parse_reference
from aotgaudi.oci.registry import Registry
from aotgaudi.remotes.remote import TransientError
from tests.unit.oci.conftest import remote_of
from tests.unit.oci.fake_registry import FakeRegistry, Handler, on, status

SECRET = "s3cret-pass"
GIVEN = Credentials("me", SECRET)
BASIC = f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"


def ask_for_basic(handler: Handler) -> bool:
    if handler.headers.get("Authorization") == BASIC:
        return False
    handler.answer(401, Www_Authenticate='Basic realm="here"')
    return True


def ask_for_token(
    realm: Callable[[Handler], str], scope_of: Callable[[Handler], str]
) -> Callable[[Handler], bool]:
    def fault(handler: Handler) -> bool:
        scope = scope_of(handler)
        if handler.headers.get("Authorization") == f"Bearer for-{scope}":
            return False
        challenge = f'Bearer realm="{realm(handler)}",service="here",scope="{scope}"'
        handler.answer(401, Www_Authenticate=challenge)
        return True

    return fault


def give_token(handler: Handler) -> None:
    scope = handler.path.rpartition("scope=")[2]
    handler.answer(200, json.dumps({"token": f"for-{scope}"}).encode())


def local_realm(handler: Handler) -> str:
    return f"http://{handler.registry.host}/token"


def test_a_password_answers_a_registry_that_wants_one(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.faults.append(ask_for_basic)
    remote = remote_of(registry, credentials=GIVEN)
    (tmp_path / "blob").write_bytes(b"bytes")

    remote.registry.put_bytes(Digest.of(b"bytes"), b"bytes")
    remote.put(Digest.of(b"bytes"), tmp_path / "blob")

    assert registry.blobs
    assert registry.authorizations[1:] == [BASIC] * (len(registry.authorizations) - 1)


def test_a_password_is_read_from_the_file_of_docker_login(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.faults.append(ask_for_basic)
    auth = BASIC.removeprefix("Basic ")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))

    remote = remote_of(registry, credentials=Credentials(config_files=(config, tmp_path / "none")))

    assert remote.resolve("none") is None


def test_a_token_is_fetched_anonymously_and_again_for_more_rights(registry: FakeRegistry) -> None:
    def scope(handler: Handler) -> str:
        return "pull" if handler.command in ("GET", "HEAD") else "push"

    registry.faults += [on("GET", "^/token", give_token), ask_for_token(local_realm, scope)]
    remote = remote_of(registry)

    assert not remote.has(Digest.of(b"bytes"))
    remote.registry.put_bytes(Digest.of(b"bytes"), b"bytes")
    assert remote.has(Digest.of(b"bytes"))


def test_a_token_is_fetched_with_the_password(registry: FakeRegistry) -> None:
    registry.faults += [on("GET", "^/token", give_token), ask_for_token(local_realm, lambda _: "pull")]

    assert not remote_of(registry, credentials=GIVEN).has(Digest.of(b""))

    asked = dict(zip(registry.log, registry.authorizations, strict=True))
    (token_request,) = [line for line in registry.log if line.startswith("GET /token")]
    assert asked[token_request] == BASIC


@pytest.mark.parametrize("credentials", [Credentials(), GIVEN], ids=["none", "wrong"])
@pytest.mark.parametrize(
    "challenge", ['Basic realm="x"', 'Bearer realm="http://{host}/token",service="x"', "Bearer", ""]
)
def test_what_is_refused_names_the_remedy_and_no_password(
    registry: FakeRegistry, credentials: Credentials, challenge: str
) -> None:
    answer = challenge.replace("{host}", registry.host)
    registry.faults.append(on("GET", "^/token", status(401)))
    registry.faults.append(lambda handler: handler.answer(401, Www_Authenticate=answer) is None)

    with pytest.raises(RemoteError, match=r"not authorised \(docker login 127\.0\.0\.1") as caught:
        remote_of(registry, credentials=credentials).resolve("v1")

    assert SECRET not in repr(caught.getrepr())
    assert SECRET not in repr(credentials)


def test_a_password_is_not_sent_to_a_realm_in_the_clear() -> None:
    client = RegistryClient(parse_reference("registry.example:5000/team/x"), GIVEN)

    challenge = 'Bearer realm="http://elsewhere.example/token"'
    reply = SimpleNamespace(status_code=401, headers={"Www-Authenticate": challenge})

    with pytest.raises(RemoteError, match="leads to plain http"):
        client._refuse_clear_realm(reply)


def test_plain_http_is_for_loopback_or_where_it_is_allowed() -> None:
    reference = parse_reference("registry.example:5000/team/x")

    assert not RegistryClient(reference, GIVEN).is_plain
    assert RegistryClient(reference, GIVEN, allow_http=True).is_plain
    assert RegistryClient(parse_reference("localhost:5000/x"), GIVEN).is_plain


def test_an_upload_is_not_led_to_plain_http(registry: FakeRegistry) -> None:
    remote = remote_of(registry)
    remote.registry.client.is_plain = False
    remote.registry.client._registry = object()

    with (
        pytest.raises(RemoteError, match="leads to plain http"),
        remote.registry.client.request("PUT", f"http://{registry.host}/upload", (201,)),
    ):
        pass


def test_a_registry_that_is_not_there_is_transient_and_said_in_one_line() -> None:
    client = RegistryClient(parse_reference("127.0.0.1:1/team/x"), Credentials())

    with pytest.raises(TransientError, match=r"^127.0.0.1:1/team/x: .*Connection refused$") as caught:
        Registry(client).get_manifest("v1")
    assert "\n" not in str(caught.value)


def test_a_proxy_is_not_asked_for_this_machine(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    assert remote_of(registry).resolve("v1") is None


def test_a_password_of_netrc_is_not_sent(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    remote_of(registry).resolve("v1")

    assert set(registry.authorizations) == {None}


def test_a_refusal_is_the_registry_s_own_word(registry: FakeRegistry) -> None:
    body = b'{"errors":[{"code":"NAME_INVALID","message":"invalid repository name\\n"}]}'
    registry.faults.append(on("GET", "/manifests/", status(400, body)))

    with pytest.raises(RemoteError, match="GET was answered with 400 invalid repository name") as caught:
        remote_of(registry).resolve("v1")
    assert not isinstance(caught.value, TransientError)
