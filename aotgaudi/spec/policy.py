"""How our own scheduler shares its time; `aotgaudi.spec.scheduler.SchedulerSpec` explains each. Imports nothing."""

from __future__ import annotations

from typing import Literal

Policy = Literal["latency", "throughput"]
