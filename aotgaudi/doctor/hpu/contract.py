"""The contract with the bridge: what we rely on, line by line, and how certain public sources are about it.

The lines are data, in ``contract.json``; docs/reference/hpu-contract.md has the same table. A check of ``aotgaudi doctor
--hpu`` examines every line. Reports from devices may change a line's mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Mark = Literal["confirmed", "inferred", "uncertain"]
"""Read in public source or the maker's documents; inferred from these; or neither."""


@dataclass(frozen=True, slots=True)
class ContractLine:
    """Something that we rely on.

    Attributes:
        statement: What holds.
        mark: How certain sources are, before anybody has run it on a device.
        source: Where that stands.
        otherwise: What follows if it does not hold.
        is_needed: Whether nothing can be built or served if it does not hold.
    """

    statement: str
    mark: Mark
    source: str
    otherwise: str
    is_needed: bool

    @property
    def consequence(self) -> str:
        """What follows if the line does not hold, for people."""
        return f"not usable: {self.otherwise}" if self.is_needed else self.otherwise


LINES: Mapping[str, ContractLine] = MappingProxyType(
    {
        line: ContractLine(**row)
        for line, row in json.loads(Path(__file__).with_name("contract.json").read_bytes()).items()
    }
)
