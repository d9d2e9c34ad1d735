"""What is found about a machine: one line each. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]
"""`error`: it is broken, or keeps what is installed here from working. `warning`: it lacks or hinders something."""

Purpose = Literal["build", "serve"]


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One thing that was looked at.

    Attributes:
        subject: What was looked at.
        status: How it is.
        observation: What was seen, in one line.
        remedy: What would be right; empty where all is well.
        prevents: What this machine cannot do for it.
    """

    subject: str
    status: Status
    observation: str
    remedy: str = ""
    prevents: tuple[Purpose, ...] = ()
