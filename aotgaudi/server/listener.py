"""Binds what a server listens on: an address, or a socket file.

A server binds before it loads the model, so that a mistake shows at once, and listens when it is ready.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aotgaudi.errors import SpecError


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to `host` (name or address) and `port` (0: any free one) that does not listen yet.

    Raises:
        SpecError: the address is in use, belongs to another machine, or is not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise refused(f"{host}:{port}", error) from error
    return listener


@contextmanager
def socket_file(path: Path) -> Iterator[socket.socket]:
    """Yields a socket bound to the file `path` that does not listen yet, and removes the file in the end.

    Users who may write to the file may connect; the process's umask decides who these are. A socket file on which nobody
    listens is replaced: it is a leftover, or belongs to a server that is still starting.

    Raises:
        SpecError: another server listens there, the file is not a socket, or it cannot be created.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if _is_left_over(path):
                path.unlink()
            listener.bind(os.fspath(path))
            bound = path.lstat()
        except OSError as error:
            raise refused(str(path), error) from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(path.lstat(), bound):
                    path.unlink()


def refused(where: str, error: Exception) -> SpecError:
    """Returns the error for an address or a path that the system refuses."""
    reason = getattr(error, "strerror", None) or error
    return SpecError(
        where, f"cannot be listened on: {reason}", "choose another with --host and --port, or --uds"
    )


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Returns where clients find `listener`: ``http://127.0.0.1:8000``, ``https://[::1]:8000``, ``unix:/run/a.sock``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _is_left_over(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # Connecting to a server with a full backlog would block.
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return path.is_socket() and not path.is_symlink()
        except OSError:  # It is not there, or a server has a full backlog.
            pass
    return False
