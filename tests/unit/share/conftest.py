"""A sealed bundle, and a registry in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aotgaudi.share.credentials import Credentials
from aotgaudi.share.http_session import DEFAULT_LIMITS, Limits
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.registry_client import RegistryClient, parse_reference
from aotgaudi.share.transfer import Conduct, Retry
from tests.unit.bundle.conftest import Sealed, captured, sealed
from tests.unit.share.fake_registry import FakeRegistry, fake_registry

__all__ = ["Sealed", "captured", "sealed"]


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


@pytest.fixture
def remote(registry: FakeRegistry) -> RegistryRemote:
    return remote_of(registry)


def remote_of(registry: FakeRegistry, reference: str = "team/bundle:v1", **options: object) -> RegistryRemote:
    credentials = options.pop("credentials", Credentials())
    limits = options.pop("limits", DEFAULT_LIMITS)
    assert isinstance(credentials, Credentials)
    assert isinstance(limits, Limits)
    client = RegistryClient(parse_reference(f"{registry.host}/{reference}"), credentials, limits=limits)
    return RegistryRemote(client)


@pytest.fixture
def waits() -> list[float]:
    """The seconds that were waited between attempts: nothing sleeps."""
    return []


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def conduct(waits: list[float], warnings: list[str]) -> Conduct:
    return Conduct(retry=Retry(sleep=waits.append), num_threads=2, warn=warnings.append)
