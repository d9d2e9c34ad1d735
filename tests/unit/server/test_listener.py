"""What a server listens on: addresses, socket files, and TLS; over real sockets, with ordinary clients."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.testclient import TestClient

from aotgaudi.errors import SpecError
from aotgaudi.server.app import create_app
from aotgaudi.server.options import Access, TlsFiles, digests_of
from aotgaudi.server.run_and_drain import bind, socket_file, url_of
from aotgaudi.server.service import Service
from tests.unit.server.conftest import WAIT_SECONDS, serving

PASSWORD = b"open, sesame"


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# Socket files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a socket file may be: not deep, since its path may not be long."""
    return Path(os.path.relpath(tmp_path / "s.sock")) if len(str(tmp_path)) > 90 else tmp_path / "s.sock"


def over(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=WAIT_SECONDS)


def test_a_socket_file_that_was_left_over_is_replaced_and_goes_with_the_server(
    service: Service, path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with socket_file(path) as listener, serving(service, listener) as running, over(path) as http:
        assert running.url == f"unix:{path}"
        assert http.get("http://any.host/health").status_code == 200

    assert not path.exists()


def test_a_socket_file_of_a_running_server_is_not_replaced(service: Service, path: Path) -> None:
    with socket_file(path) as listener, serving(service, listener), over(path) as http:
        with (
            pytest.raises(SpecError, match="cannot be listened on: Address already in use") as refused,
            socket_file(path),
        ):
            pass

        assert refused.value.exit_code == 2
        assert str(path) in str(refused.value)
        assert http.get("http://a/health").status_code == 200


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_another_file_is_never_replaced(tmp_path: Path, path: Path, kind: str) -> None:
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "precious").write_text("precious")
        path.symlink_to(tmp_path / "precious")

    with pytest.raises(SpecError, match="cannot be listened on: Address already in use"), socket_file(path):
        pass

    assert os.path.lexists(path)


def test_a_path_that_cannot_be_a_socket_file_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(SpecError, match="cannot be listened on: AF_UNIX path too long"),
        socket_file(tmp_path / ("x" * 108)),
    ):
        pass
    with (
        pytest.raises(SpecError, match="cannot be listened on: No such file"),
        socket_file(Path("no-such-folder/s.sock")),
    ):
        pass


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o755), (0o007, 0o770), (0o077, 0o700)])
def test_the_umask_says_who_may_connect(path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        with socket_file(path):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_urls_name_what_is_listened_on(path: Path) -> None:
    with bind("127.0.0.1", 0) as one, socket_file(path) as other:
        port = one.getsockname()[1]

        assert url_of(one) == f"http://127.0.0.1:{port}"
        assert url_of(one, has_tls=True) == f"https://127.0.0.1:{port}"
        assert url_of(other) == f"unix:{path}"


@pytest.mark.skipif(not _has_ipv6_loopback(), reason="no IPv6 on this machine")
def test_the_url_of_an_address_of_ipv6_has_brackets() -> None:
    with bind("::1", 0) as listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


# TLS


def make_certificate(folder: Path, name: str = "server", password: bytes | None = None) -> tuple[Path, Path]:
    """Writes a certificate for this machine that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encryption = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate_path, key_path = folder / f"{name}.pem", folder / f"{name}.key"
    certificate_path.write_bytes(certificate.public_bytes(pem))
    key_path.write_bytes(key.private_bytes(pem, pkcs8, encryption))
    return certificate_path, key_path


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    certificate, key = make_certificate(tmp_path)
    return TlsFiles(ssl_certfile=certificate, ssl_keyfile=key)


def trusting(files: TlsFiles) -> httpx.Client:
    return httpx.Client(
        verify=ssl.create_default_context(cafile=str(files.ssl_certfile)), timeout=WAIT_SECONDS
    )


def at_localhost(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


def test_key_and_certificate_may_be_one_file(service: Service, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())

    with (
        serving(service, tls=TlsFiles(ssl_certfile=both).context()) as running,
        trusting(TlsFiles(ssl_certfile=certificate)) as http,
    ):
        assert http.get(f"{at_localhost(running.url)}/health").status_code == 200


def test_a_connection_over_tls_that_idles_does_not_delay_the_end(
    service: Service, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with trusting(files) as http:
        with serving(service, tls=files.context()) as running:
            http.get(f"{at_localhost(running.url)}/health")
            began = time.monotonic()

        assert time.monotonic() - began < 15  # To end TLS, asyncio would wait 30 s.
        assert running.server.num_connections == 0
        assert not caplog.records


def _files(folder: Path, **names: str) -> TlsFiles:
    return TlsFiles(**{name: folder / value for name, value in names.items()})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"ssl_certfile": "none.pem"}, "none.pem: cannot be used: No such file or directory"),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "none"},
            "server.pem, .*none: cannot be used: No such file",
        ),
        ({"ssl_certfile": "."}, "cannot be used"),
        ({"ssl_keyfile": "server.key"}, "--ssl-keyfile: is of no use without a certificate"),
        ({"ssl_certfile": "server.key"}, "server.key: cannot be used"),
        ({"ssl_certfile": "server.pem"}, "server.pem: cannot be used"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "server.pem"}, "server.pem: cannot be used"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "other.key"}, "other.key: cannot be used: .*mismatch"),
        ({"ssl_certfile": "torn.pem", "ssl_keyfile": "server.key"}, "torn.pem, .*server.key: cannot be used"),
        ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key"}, "locked.key: cannot be used"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, names: dict[str, str], said: str
) -> None:
    make_certificate(tmp_path)
    make_certificate(tmp_path, "other")
    make_certificate(tmp_path, "locked", PASSWORD)
    (tmp_path / "torn.pem").write_bytes((tmp_path / "server.pem").read_bytes()[:200])

    with pytest.raises(SpecError, match=said) as refused:
        _files(tmp_path, **names).context()

    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert "barley" not in str(refused.value)


@pytest.mark.process
def test_without_files_no_tls_and_nothing_imported() -> None:
    code = "import sys; from aotgaudi.server.options import TlsFiles; print(TlsFiles().context(), 'ssl' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["None", "False"]


# The root path


def test_the_root_path_is_taken_off_and_opens_no_other_path(service: Service) -> None:
    access = Access(key_digests=digests_of(["sesame"], "test"))
    client = TestClient(create_app(service, access=access, root_path="/llm"))
    with_key = {"Authorization": "Bearer sesame"}

    for prefix in ("", "/llm"):
        answer = client.post(f"{prefix}/v1/completions", json={"prompt": "hi"}, headers=with_key)
        assert answer.json()["choices"][0]["text"] == "Hello"
        probed = [client.get(f"{prefix}/{name}").status_code for name in ("health", "ready", "v1/models")]
        assert probed == [200, 200, 401]
    for path in ("/llmhealth", "/llm", "/llm/llm/health", "/other/health", "/llm/v1/models/x/health"):
        assert client.get(path).status_code == 401, path
    shown = client.get("/metrics").text
    assert 'endpoint="/health"' in shown
    assert "/llm" not in shown
