"""What a server shows of itself besides its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """`access_log`: the log has a line for each request. `dashboard`: there is a page that shows the running server."""

    log_format: LogFormat = "text"
    access_log: bool = False
    dashboard: bool = False
