"""What a server listens on: addresses, socket files, and TLS; over real sockets, with ordinary clients."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aotgaudi.errors import SpecError
from aotgaudi.server.app import create_app
from aotgaudi.server.listener import bind, socket_file, url_of
from aotgaudi.server.options import OPEN_ACCESS, Access, StopTimes, TlsFiles, digests_of
from aotgaudi.server.run_and_drain import HttpServer
from aotgaudi.server.service import Service

WAIT_SECONDS = 10
PASSWORD = b"open, sesame"


@dataclass
class Running:
    """A server that runs on a thread."""

    url: str
    server: HttpServer


@contextmanager
def serving(
    service: Service,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    root_path: str = "",
    access: Access = OPEN_ACCESS,
) -> Iterator[Running]:
    urls: queue.Queue[str] = queue.Queue()
    server = HttpServer(
        create_app(service, access=access, root_path=root_path),
        listener,
        service,
        on_listening=urls.put,
        stop_times=StopTimes(delay=0, drain=1, flush=0.5),
        tls=tls,
    )
    thread = threading.Thread(target=server.run_until_stopped, daemon=True)
    thread.start()
    try:
        yield Running(urls.get(timeout=WAIT_SECONDS), server)
    finally:
        server.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


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


def test_the_official_client_asks_over_a_socket_file_and_the_file_goes_with_the_server(
    service: Service, path: Path
) -> None:
    with socket_file(path) as listener, serving(service, listener) as running, over(path) as http:
        client = openai.OpenAI(base_url="http://chat.internal/v1", api_key="none", http_client=http)
        whole = client.completions.create(model="tiny", prompt="hi")
        streamed = client.completions.create(model="tiny", prompt="hi", stream=True)
        text = "".join(chunk.choices[0].text for chunk in streamed)
        probed = [http.get(f"http://any.host/{name}").status_code for name in ("health", "ready", "metrics")]

    assert running.url == f"unix:{path}"
    assert (whole.choices[0].text, text) == ("Hello", "Hello")
    assert probed == [200, 200, 200]
    assert not path.exists()


def test_a_socket_file_that_was_left_over_is_replaced(service: Service, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with socket_file(path) as listener, serving(service, listener), over(path) as http:
        assert http.get("http://a/health").status_code == 200


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


def test_the_official_client_asks_over_tls(service: Service, files: TlsFiles) -> None:
    with serving(service, bind("127.0.0.1", 0), files.context()) as running, trusting(files) as http:
        url = at_localhost(running.url)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        whole = client.completions.create(model="tiny", prompt="hi")
        streamed = client.completions.create(model="tiny", prompt="hi", stream=True)
        text = "".join(chunk.choices[0].text for chunk in streamed)
        probed = [http.get(f"{url}/{name}").status_code for name in ("health", "ready", "metrics")]
        with pytest.raises(httpx.ConnectError), httpx.Client() as untrusting:
            untrusting.get(f"{url}/health")
        with pytest.raises(httpx.RemoteProtocolError), httpx.Client() as plain:
            plain.get(f"{url.replace('https', 'http')}/health")

    assert running.url.startswith("https://")
    assert (whole.choices[0].text, text) == ("Hello", "Hello")
    assert probed == [200, 200, 200]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_current_versions_of_tls_work(
    service: Service, files: TlsFiles, version: ssl.TLSVersion
) -> None:
    context = ssl.create_default_context(cafile=str(files.ssl_certfile))
    context.minimum_version = context.maximum_version = version

    with (
        serving(service, bind("127.0.0.1", 0), files.context()) as running,
        httpx.Client(verify=context) as http,
    ):
        assert http.get(f"{at_localhost(running.url)}/health").status_code == 200


def test_key_and_certificate_may_be_one_file(service: Service, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())

    with (
        serving(service, bind("127.0.0.1", 0), TlsFiles(ssl_certfile=both).context()) as running,
        trusting(TlsFiles(ssl_certfile=certificate)) as http,
    ):
        assert http.get(f"{at_localhost(running.url)}/health").status_code == 200


def test_a_connection_over_tls_that_idles_does_not_delay_the_end(
    service: Service, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with trusting(files) as http:
        with serving(service, bind("127.0.0.1", 0), files.context()) as running:
            http.get(f"{at_localhost(running.url)}/health")
            began = time.monotonic()

        assert time.monotonic() - began < 3
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


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_requests_come_with_the_root_path_or_without(service: Service, prefix: str) -> None:
    access = Access(key_digests=digests_of(["sesame"], "test"))

    with serving(service, bind("127.0.0.1", 0), root_path="/llm", access=access) as running:
        url = running.url + prefix
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="hi")
        with httpx.Client(base_url=url) as http:
            probed = {
                name: http.get(f"/{name}").status_code for name in ("health", "ready", "metrics", "v1/models")
            }

    assert answer.choices[0].text == "Hello"
    assert probed == {"health": 200, "ready": 200, "metrics": 200, "v1/models": 401}


@pytest.mark.parametrize(
    "path", ["/llmhealth", "/llm", "/llm/llm/health", "/other/health", "/llm/v1/models/x/health"]
)
def test_no_other_path_is_opened_by_the_root_path(service: Service, path: str) -> None:
    access = Access(key_digests=digests_of(["sesame"], "test"))

    with serving(service, bind("127.0.0.1", 0), root_path="/llm", access=access) as running:
        assert httpx.get(running.url + path).status_code == 401


def test_metrics_name_the_path_of_the_route_and_not_the_root_path(service: Service) -> None:
    with serving(service, bind("127.0.0.1", 0), root_path="/llm") as running:
        httpx.get(f"{running.url}/llm/health")
        shown = httpx.get(f"{running.url}/metrics").text

    assert 'endpoint="/health"' in shown
    assert "/llm" not in shown
