"""How a registry is authenticated with, and what never happens to a password."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import RemoteError
from aotgaudi.share.credentials import Credentials, Login
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.registry_client import RegistryClient, parse_reference
from aotgaudi.share.remote import TransientError
from aotgaudi.share.transfer import in_threads
from tests.unit.share.conftest import remote_of
from tests.unit.share.fake_registry import FakeRegistry, Handler, ask_for_basic, fake_registry, on, status

SECRET = "s3cret-pass"
BASIC = f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"


def given(registry: FakeRegistry, *token_hosts: str) -> Credentials:
    """The password, for that registry."""
    return Credentials((Login(registry.host, "me", SECRET),), token_hosts=frozenset(token_hosts))


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
    registry.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
    remote = remote_of(registry, credentials=given(registry))
    (tmp_path / "blob").write_bytes(b"bytes")

    remote.put_bytes(Digest.of(b"bytes"), b"bytes")
    remote.put(Digest.of(b"bytes"), tmp_path / "blob")

    assert registry.blobs
    assert registry.authorizations[1:] == [BASIC] * (len(registry.authorizations) - 1)


def test_a_password_is_read_from_the_file_of_docker_login(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
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
    remote.put_bytes(Digest.of(b"bytes"), b"bytes")
    assert remote.has(Digest.of(b"bytes"))


def test_a_token_is_fetched_with_the_password(registry: FakeRegistry) -> None:
    registry.faults += [on("GET", "^/token", give_token), ask_for_token(local_realm, lambda _: "pull")]

    assert not remote_of(registry, credentials=given(registry)).has(Digest.of(b""))

    asked = dict(zip(registry.log, registry.authorizations, strict=True))
    (token_request,) = [line for line in registry.log if line.startswith("GET /token")]
    assert asked[token_request] == BASIC


@pytest.mark.parametrize("has_password", [False, True], ids=["none", "wrong"])
@pytest.mark.parametrize(
    "challenge", ['Basic realm="x"', 'Bearer realm="http://{host}/token",service="x"', "Bearer", ""]
)
def test_what_is_refused_names_the_remedy_and_no_password(
    registry: FakeRegistry, has_password: bool, challenge: str
) -> None:
    credentials = given(registry) if has_password else Credentials()
    answer = challenge.replace("{host}", registry.host)
    registry.faults.append(on("GET", "^/token", status(401)))
    registry.faults.append(lambda handler: handler.answer(401, Www_Authenticate=answer) is None)

    with pytest.raises(RemoteError, match=r"not authorised \(docker login 127\.0\.0\.1") as caught:
        remote_of(registry, credentials=credentials).resolve("v1")

    assert SECRET not in repr(caught.getrepr())
    assert SECRET not in repr(credentials)


@pytest.fixture
def elsewhere() -> Iterator[FakeRegistry]:
    """Another host than the registry's: it has another port."""
    with fake_registry() as other:
        yield other


def test_a_password_does_not_go_where_an_upload_is_led(
    registry: FakeRegistry, elsewhere: FakeRegistry
) -> None:
    registry.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
    location = f"http://{elsewhere.host}/v2/team/bundle/blobs/uploads/1"
    registry.faults.append(on("POST", "/uploads/", status(202, Location=location)))
    remote = remote_of(registry, credentials=given(registry))

    remote.put_bytes(Digest.of(b"bytes"), b"bytes")

    assert elsewhere.num_requests("PUT") == 1
    assert elsewhere.authorizations == [None]


def test_a_password_does_not_answer_where_an_upload_is_led(
    registry: FakeRegistry, elsewhere: FakeRegistry
) -> None:
    elsewhere.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
    location = f"http://{elsewhere.host}/v2/team/bundle/blobs/uploads/1"
    registry.faults.append(on("POST", "/uploads/", status(202, Location=location)))

    with pytest.raises(RemoteError, match="not authorised"):
        remote_of(registry, credentials=given(registry)).put_bytes(Digest.of(b"bytes"), b"bytes")
    assert elsewhere.authorizations == [None]


def test_a_password_does_not_follow_a_redirect(registry: FakeRegistry, elsewhere: FakeRegistry) -> None:
    elsewhere.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
    registry.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
    registry.faults.append(on("HEAD", "", status(307, Location=f"http://{elsewhere.host}/x")))

    with pytest.raises(RemoteError, match="not authorised"):
        remote_of(registry, credentials=given(registry)).has(Digest.of(b"bytes"))
    assert elsewhere.authorizations == [None]


def test_a_password_goes_to_a_realm_elsewhere_only_where_that_host_is_allowed(
    registry: FakeRegistry, elsewhere: FakeRegistry
) -> None:
    def give(handler: Handler) -> None:
        if ask_for_basic(handler, f"me:{SECRET}"):
            return
        give_token(handler)

    elsewhere.faults.append(on("GET", "^/token", give))
    registry.faults.append(ask_for_token(lambda _: f"http://{elsewhere.host}/token", lambda _: "pull"))

    with pytest.raises(RemoteError, match=f"allow it with --token-host {elsewhere.host}"):
        remote_of(registry, credentials=given(registry)).has(Digest.of(b""))
    assert elsewhere.authorizations == [None]

    assert not remote_of(registry, credentials=given(registry, elsewhere.host)).has(Digest.of(b""))
    assert elsewhere.authorizations == [None, BASIC]


def test_a_realm_elsewhere_may_still_give_a_token_to_anybody(
    registry: FakeRegistry, elsewhere: FakeRegistry
) -> None:
    elsewhere.faults.append(on("GET", "^/token", give_token))
    registry.faults.append(ask_for_token(lambda _: f"http://{elsewhere.host}/token", lambda _: "pull"))

    assert not remote_of(registry, credentials=given(registry)).has(Digest.of(b""))
    assert elsewhere.authorizations == [None]


def test_a_password_is_not_sent_to_a_realm_in_the_clear() -> None:
    reference = parse_reference("registry.example:5000/team/x")
    client = RegistryClient(reference, Credentials((Login(reference.host, "me", SECRET),)))

    with pytest.raises(RemoteError, match="leads to plain http"):
        client._fetch_token({"realm": "http://registry.example:5000/token"})


@pytest.mark.parametrize("url", ["http://other.example/token", "http://10.0.0.1:5000/token"])
def test_a_registry_on_this_machine_leads_nobody_elsewhere_in_the_clear(
    registry: FakeRegistry, url: str
) -> None:
    client = remote_of(registry, credentials=given(registry, "other.example", "10.0.0.1:5000")).client

    with pytest.raises(RemoteError, match="leads to plain http"):
        client._fetch_token({"realm": url})
    with pytest.raises(RemoteError, match="leads to plain http"), client.request("PUT", url, (201,)):
        pass


@pytest.mark.parametrize(
    "url", ["http://{there}\\\\@{here}/x", "http://{there}\\@{here}/x", "http://me@{here}/x"]
)
def test_a_url_that_two_readers_read_differently_is_not_followed(
    registry: FakeRegistry, elsewhere: FakeRegistry, url: str
) -> None:
    registry.faults.append(lambda handler: ask_for_basic(handler, f"me:{SECRET}"))
    location = url.format(there=elsewhere.host, here=registry.host)
    registry.faults.append(on("POST", "/uploads/", status(202, Location=location)))

    with pytest.raises(RemoteError, match="led to a URL that"):
        remote_of(registry, credentials=given(registry)).put_bytes(Digest.of(b"x"), b"x")
    assert elsewhere.log == []


def test_a_redirect_without_end_is_not_followed(registry: FakeRegistry) -> None:
    registry.faults.append(on("HEAD", "", lambda handler: handler.answer(307, Location=handler.path)))

    with pytest.raises(RemoteError, match="leads from place to place"):
        remote_of(registry).has(Digest.of(b""))
    assert registry.num_requests("HEAD") == 6


def test_threads_that_need_different_tokens_all_get_theirs(registry: FakeRegistry) -> None:
    """Each token is good for one scope only, so that a thread often finds another's token, which does not help it."""

    def scope(handler: Handler) -> str:
        return "pull" if handler.command in ("GET", "HEAD") else "both"

    registry.faults += [on("GET", "^/token", give_token), ask_for_token(local_realm, scope)]
    remote = remote_of(registry)

    def work(number: int) -> None:
        if number % 2:
            remote.put_bytes(Digest.of(b"%d" % number), b"%d" % number)
        else:
            remote.has(Digest.of(b""))

    registry.faults[1] = lenient(registry.faults[1])
    in_threads(work, range(16), 8)

    assert len(registry.blobs) == 8


def lenient(fault: Callable[[Handler], bool]) -> Callable[[Handler], bool]:
    """As real token services: a token to push is one to pull as well."""
    return lambda handler: handler.headers.get("Authorization") != "Bearer for-both" and fault(handler)


def test_plain_http_is_for_loopback_or_where_it_is_allowed() -> None:
    reference = parse_reference("registry.example:5000/team/x")

    assert not RegistryClient(reference, Credentials()).is_plain
    assert RegistryClient(reference, Credentials(), allow_http=True).is_plain
    assert RegistryClient(parse_reference("localhost:5000/x"), Credentials()).is_plain


def test_an_upload_is_not_led_to_plain_http(registry: FakeRegistry) -> None:
    remote = remote_of(registry)
    remote.client.is_plain = False

    with (
        pytest.raises(RemoteError, match="leads to plain http"),
        remote.client.request("PUT", f"http://{registry.host}/upload", (201,)),
    ):
        pass


def test_a_registry_that_is_not_there_is_transient_and_said_in_one_line() -> None:
    client = RegistryClient(parse_reference("127.0.0.1:1/team/x"), Credentials())

    with pytest.raises(TransientError, match=r"^127.0.0.1:1/team/x: .*Connection refused$") as caught:
        RegistryRemote(client).get_manifest("v1")
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
