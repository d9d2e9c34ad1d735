"""Options of `serve`, as plain values: where it listens, the limits of clients, what it shows, and how it stops.

Imports nothing else of the server, so that the command line and `doctor` can read the defaults cheaply.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from aotgaudi.errors import SpecError

if TYPE_CHECKING:
    import ssl

LogFormat = Literal["text", "json"]

ToolCallParser = Literal["hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["deepseek_r1", "qwen3"]
"""Names as in vLLM."""

MAX_CONNECTIONS = 4096
_SPARE_FILES = 32
"""Files kept free for the log, ``/proc`` and clients that get a 503."""
_DESCRIPTORS = "/proc/self/fd"
_MAX_KEY_CHARS = 512
_KEY = re.compile(rf"[!-~]{{1,{_MAX_KEY_CHARS}}}")
_MAX_KEY_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens and for whom, from the options of `serve`.

    Attributes:
        host: Name or address.
        port: 0 for any free one.
        allowed_hosts: Names that requests may use in addition to those of `host`.
        uds: Listen on this socket file instead.
        root_path: Where clients find the API behind a proxy, such as ``/llm``. The paths of requests may include it or not.
    """

    host: str
    port: int
    uds: Path | None = None
    root_path: str = ""
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The files of a server that speaks TLS, in PEM. Without `ssl_certfile`, it speaks plain HTTP.

    Attributes:
        ssl_certfile: The server's certificate, followed by those of the authorities between it and the root.
        ssl_keyfile: Its private key. None: the key is in `ssl_certfile`.
    """

    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def context(self) -> ssl.SSLContext | None:
        """Reads the files, and returns None without `ssl_certfile`. Later changes of the files have no effect.

        Raises:
            SpecError: a file cannot be used.
        """
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise SpecError(
                    "--ssl-keyfile", "is of no use without a certificate", "give --ssl-certfile, too"
                )
            return None
        import ssl  # Imported here because most servers speak no TLS.

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, b"")
        except OSError as error:  # An SSLError is one.
            files = (self.ssl_certfile, self.ssl_keyfile)
            raise SpecError(
                ", ".join(str(file) for file in files if file is not None),
                f"cannot be used: {error.strerror}",
                "a certificate and its key in PEM, without a password",
            ) from error
        return context


@dataclass(frozen=True, kw_only=True)
class Access:
    """Which clients may use a server.

    Attributes:
        key_digests: The sha256 of each API key. If empty, no client needs a key. The keys themselves are not kept.
        allowed_origins: Origins whose pages may read answers in a browser (CORS); ``*`` for all. If empty, only the
            server's.
    """

    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()


OPEN_ACCESS = Access()


def digests_of(keys: Iterable[str], where: str) -> tuple[bytes, ...]:
    """Returns the sha256 of each API key. For a text that is not a key, raises SpecError, which names `where` but no key."""
    digests = []
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise SpecError(
                where,
                f"key {number} is not an API key",
                f"1 to {_MAX_KEY_CHARS} printable ASCII characters, no spaces",
            )
        digests.append(hashlib.sha256(key.encode()).digest())
    return tuple(dict.fromkeys(digests))


def read_key_digests(path: Path) -> tuple[bytes, ...]:
    """Returns the sha256 of each API key of a file: one key a line, empty lines ignored.

    Raises:
        SpecError: the file cannot be read, has no key, or has a line that is not a key.
    """
    expected = "a file of API keys, one a line"
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", expected) from error
    if len(content) > _MAX_KEY_FILE_BYTES:
        raise SpecError(str(path), f"is larger than {_MAX_KEY_FILE_BYTES} bytes", expected)
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    digests = digests_of(filter(None, lines), str(path))
    if not digests:
        raise SpecError(str(path), "has no API key", expected)
    return digests


@dataclass(frozen=True, kw_only=True)
class ReplyParsers:
    """How the model writes calls of tools and reasoning.

    Attributes:
        enable_auto_tool_choice: Whether requests may leave it to the model to call tools.
        tool_call_parser: How the model writes calls of tools.
        reasoning_parser: How the model marks its reasoning.

    Raises:
        SpecError: the model may call tools, but there is no `tool_call_parser`.
    """

    enable_auto_tool_choice: bool = False
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            parsers = ", ".join(get_args(ToolCallParser))
            raise SpecError("--enable-auto-tool-choice", "needs --tool-call-parser", f"one of {parsers}")


@dataclass(frozen=True, kw_only=True)
class Observability:
    """What a server shows in addition to its metrics.

    Attributes:
        log_format: Lines of the log, as text or as JSON objects.
        access_log: Log a line for each request.
        otlp_traces_endpoint: URL of the OpenTelemetry collector that gets a span for each request; None for no spans.
    """

    log_format: LogFormat = "text"
    access_log: bool = False
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class StopTimes:
    """How long the stages of a stop may take, in seconds.

    Attributes:
        delay: How long the socket stays open after SIGTERM while new requests get 503, so that a load balancer that polls
            ``/ready`` stops sending. SIGINT and a second signal skip the delay.
        drain: How long running requests may take to end. Then they are aborted with an error.
        flush: How long complete answers may take to reach their clients.
    """

    delay: float = 5.0
    drain: float = 30.0
    flush: float = 5.0


DEFAULT_STOP_TIMES = StopTimes()


def allow_connections() -> int:
    """Returns how many connections this process may have: `MAX_CONNECTIONS`, or fewer if open files are scarce.

    Raises the soft limit of open files as far as they need. Call it when all other files are open, since it counts them.

    Raises:
        SpecError: the hard limit of open files leaves none.
    """
    used = len(os.listdir(_DESCRIPTORS)) + _SPARE_FILES
    (soft, hard), infinite = resource.getrlimit(resource.RLIMIT_NOFILE), resource.RLIM_INFINITY
    wanted = used + MAX_CONNECTIONS
    if soft != infinite and soft < wanted:
        soft = wanted if hard == infinite else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = MAX_CONNECTIONS if soft == infinite else min(MAX_CONNECTIONS, soft - used)
    if found < 1:
        raise SpecError(
            "connections",
            f"need {used + 1} open files or more, and this process may open {soft}",
            "raise the hard limit (`ulimit -Hn`, LimitNOFILE=, --ulimit nofile=)",
        )
    return found
