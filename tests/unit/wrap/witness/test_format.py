"""docs/formats/witness-events.md holds for both sides: its lines are written as they stand, each type is known."""

from __future__ import annotations

import json
import re

from aotgaudi_witness.write import line_of

from aotgaudi.wrap import verdict as findings
from aotgaudi.wrap.events import parse_line
from tests.environment import ROOT
from tests.unit.wrap.witness.test_whole import SOURCES

TEXT = (ROOT / "docs/formats/witness-events.md").read_text(encoding="utf-8")
GOLDEN = TEXT.partition("## Examples")[2].partition("```\n")[2].partition("```")[0].splitlines()


def documented() -> set[str]:
    rows = TEXT.partition("## Types")[2].partition("\n## ")[0].splitlines()
    found = {match[1] for row in rows if (match := re.match(r"\| `(\w+)` \|", row))}
    return found - {"e"}  # the head


def test_the_documented_lines_are_those_that_are_written() -> None:
    assert len(GOLDEN) == 16
    for line in GOLDEN:
        assert line_of(json.loads(line)) == line.encode() + b"\n"


def test_the_documented_lines_are_read() -> None:
    events = [parse_line(line.encode()) for line in GOLDEN]

    assert None not in events
    assert {event.kind for event in events if event is not None} == documented()


def test_every_type_that_is_written_is_documented_and_known_to_the_reader() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    written = set(re.findall(r"emit(?:_values)?\(\s*\"(\w+)\"", source)) | {"loaded", "generate"}

    assert written == documented()
    assert documented() == findings._SILENT | findings._READERS.keys()
