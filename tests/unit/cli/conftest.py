"""Commands run in the process of the tests, which may not give its rights away for good."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _rights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.server.launch.leave_others_alone", lambda: False)
