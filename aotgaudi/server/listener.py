"""Binds what a server listens on: an address, or a socket file.

A server binds before it loads the model, so that a mistake shows at once, and listens when it is ready. A socket file that
nobody listens on is a leftover, or belongs to a server that is still starting. A later server replaces it either way. The
server that is still starting notices when it begins to listen, as with an address.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from aotgaudi.errors import SpecError

_MAX_PORT = 65535
_MAX_PATH_BYTES = 107
"""The longest path of a socket file on Linux."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to `host` (name or address) and `port` (0: any free one) that does not listen yet.

    Raises:
        SpecError: the address is in use, belongs to another machine, or is not allowed.
    """
    where = f"{host}:{port}"
    if not 0 <= port <= _MAX_PORT:
        raise SpecError(where, "is not an address to listen on", f"a port is from 0 to {_MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SpecError(where, f"is not an address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise refused(where, error) from error
    return listener


class SocketFile(socket.socket):
    """A socket, bound to a file, that does not listen yet. Closing it removes the file.

    Users who may write to the file may connect. The process's umask decides who these are.
    """

    def __init__(self, path: Path) -> None:
        """Replaces a socket file that nobody listens on.

        Raises:
            SpecError: another server listens there, the file is not a socket, or it cannot be created.
        """
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path, self._identity = path, (0, 0)
        try:
            if len(os.fsencode(path)) > _MAX_PATH_BYTES:
                raise SpecError(
                    str(path), "is too long for a socket file", f"a path of {_MAX_PATH_BYTES} bytes at most"
                )
            _remove_left_over(path)
            self.bind(os.fspath(path))
            self._identity = _identity_of(path)
        except OSError as error:
            self.close()
            raise refused(str(path), error) from error
        except SpecError:
            self.close()
            raise

    @property
    def is_in_place(self) -> bool:
        """Whether clients that connect to the path reach this socket."""
        try:
            return _identity_of(self._path) == self._identity
        except OSError:
            return False

    def close(self) -> None:
        """Closes the socket, and removes the file unless another server has replaced it. Idempotent."""
        if self.is_in_place:
            with suppress(OSError):
                self._path.unlink()
        super().close()


def refused(where: str, error: OSError) -> SpecError:
    """Returns the error for an address or a path that the system refuses."""
    return SpecError(
        where, f"cannot be listened on: {error.strerror}", "choose another with --host and --port, or --uds"
    )


def check_in_place(listener: socket.socket) -> None:
    """Raises SpecError if `listener` is a socket file that another process has replaced."""
    if isinstance(listener, SocketFile) and not listener.is_in_place:
        raise refused(listener.getsockname(), OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)))


def address_of(listener: socket.socket) -> str:
    """Returns ``127.0.0.1:8000``, ``[::1]:8000``, or the path of a socket file."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Returns where clients find `listener`: ``http://127.0.0.1:8000``, ``https://[::1]:8000``, ``unix:/run/a.sock``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{address_of(listener)}"
    return f"{'https' if has_tls else 'http'}://{address_of(listener)}"


def _identity_of(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_left_over(path: Path) -> None:
    """Removes a socket file that nobody listens on. Raises SpecError for any other file, and OSError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SpecError(str(path), "is there already, and not a socket file", "a path for a new one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # Connecting to a server with a full backlog would block.
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
