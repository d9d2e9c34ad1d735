"""References: ``HOST[:PORT]/REPOSITORY[:TAG][@sha256:...]``.

The grammar is that of distribution/reference, with one difference: the host is required. No registry is the default.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from aotgaudi.errors import SpecError

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<host>{_HOST})/(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MAX_REPOSITORY = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository in a registry, and, where they are given, a tag and the digest of a manifest."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def label(self) -> str:
        """``HOST/REPOSITORY``."""
        return f"{self.host}/{self.repository}"

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether ``HOST[:PORT]`` is this machine."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether the part before the first slash reads as a host: it has a dot or a port, or is localhost."""
    return text == "localhost" or "." in text or ":" in text


def parse_reference(text: str) -> Reference:
    """Parses a reference. Raises SpecError."""
    found = _REFERENCE.fullmatch(text)
    if found is None or not is_host(found["host"]) or len(found["repository"]) > _MAX_REPOSITORY:
        raise SpecError(
            f"{text:.200}", "is no reference", "HOST/REPOSITORY[:TAG][@sha256:DIGEST], in lower case"
        )
    return Reference(found["host"], found["repository"], found["tag"], found["digest"])
