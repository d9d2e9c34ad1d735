"""The report as a value, with every number that the page shows and everything that ``--json`` prints.

``report.compute`` makes it, and ``report.page`` shows it. Numbers on the page carry their place in the JSON form, such as
``coverage.phases.0.num_reachable``, so that both can be compared.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aotgaudi.document import Value
from aotgaudi.manifest.summary import Memory

REPORT_SCHEMA: Literal["aotgaudi.report/1"] = "aotgaudi.report/1"

Origin = Literal["public", "closing", "short"]
"""The reason for a prompt or decode entry: it is in the public table, closes it, or is a short query of the spec."""


class Subject(Value):
    """The subject of a report. `path` is as the user gave it."""

    path: str
    kind: Literal["spec", "manifest", "bundle"]
    manifest_id: str
    model: str
    backend: str
    version: str
    """The version of the bucketing rules."""
    strategy: str


class KindOfEntry(Value):
    """The entries of one kind. `num_warm` is None if it is unknown what is built."""

    kind: str
    num_entries: int
    num_warm: int | None
    num_closing: int
    largest: str


class Entries(Value):
    """All entries. `programs` is the number of their distinct programs, if known."""

    num_entries: int
    num_warm: int | None
    num_closing: int
    num_programs: int | None
    kinds: tuple[KindOfEntry, ...]


class Phase(Value):
    """What is proved about the steps of one kind, counted in `unit`."""

    kind: str
    unit: str
    num_reachable: int
    num_uncovered: int


class ReportedHole(Value):
    """One of the disjoint sets of uncovered steps, and its smallest step (the witness)."""

    kind: str
    text: str
    num_uncovered: int
    witness: str
    shape: tuple[int, ...]


class ClosingEntry(Value):
    """An entry that was added to the public table, and a step that no other added entry would serve."""

    entry: str
    witness: tuple[int, ...] | None


class ReportedCoverage(Value):
    """The proof. `smallest` is the smallest witness.

    `holes` and `closing` are the first of `num_holes` and `num_closing`.
    """

    mode: str
    scheduler: str
    is_closed: bool
    result: str
    smallest: str | None
    phases: tuple[Phase, ...]
    num_holes: int
    holes: tuple[ReportedHole, ...]
    num_closing: int
    closing: tuple[ClosingEntry, ...]
    unproved: tuple[str, ...]
    left_out: tuple[str, ...]


class Axis(Value):
    """A dimension of a plane, cut into bins. Bin i begins at `firsts[i]` and ends before the next, the last at `last`.

    A value stands for `scale` of `noun`.
    """

    noun: str
    firsts: tuple[int, ...]
    last: int
    scale: int = 1

    def bounds(self, index: int) -> tuple[int, int]:
        """Returns the first and last value of a bin."""
        following = self.firsts[index + 1] - 1 if index + 1 < len(self.firsts) else self.last
        return self.firsts[index], following


class Traffic(Value):
    """The work of a trace's steps in a cell or an entry.

    `useful` is the work that the steps needed, and `padded` the work that was done, in the trace's unit. `share` is the
    part, 0 to 1, of the trace's wasted work that was wasted here.
    """

    num_steps: int
    useful: float
    padded: float
    share: float


class PlaneCell(Value):
    """A cell of both axes that holds steps: how many can be formed, and how many of these have no entry.

    `padding` is the mean factor, 1 or more, over a sample of the cell's covered steps; None if no step of the sample is
    covered. `num_entries` counts the entries whose own size is in the cell. `traffic` is that of a trace; None if it had no
    step here. `num_cold` counts steps that have entries of which none is built; None if it is unknown what is built.
    """

    x: int
    y: int
    num_steps: int
    num_uncovered: int
    padding: float | None
    num_entries: int
    traffic: Traffic | None = None
    num_cold: int | None = None


class EntryPoint(Value):
    """Entries of one size, apart from the batch. `x` and `y` are in the units of the axes. `is_warm` None means unknown."""

    x: int
    y: float
    num_entries: int
    origin: Origin
    is_warm: bool | None


class MeanPadding(Value):
    """Mean padding over the steps that can be formed, each counted once. See ``bucketing/padding.py``."""

    mean: float
    error: float
    worst: float
    worst_step: tuple[int, int, int]
    is_sampled: bool


class Plane(Value):
    """The steps of one phase: prompts by context and query, decodes by batch and blocks.

    `points` is empty if there would be too many. `PlaneCell.num_entries` counts the entries in any case.
    """

    phase: Literal["prompt", "decode"]
    x: Axis
    y: Axis
    cells: tuple[PlaneCell, ...]
    points: tuple[EntryPoint, ...]
    witnesses: tuple[tuple[int, float], ...]
    padding: MeanPadding | None
    traffic: Traffic | None = None


class EntryUse(Value):
    """An entry, and the trace's steps that ran in it."""

    entry: str
    traffic: Traffic


class ReportedTrace(Value):
    """A trace that was replayed through the engine's scheduler, in `seconds` of simulated time.

    `num_refused` requests do not fit the limits, and `num_shortened` answers were cut to fit. Of `num_entries` for prompts
    and decodes, `num_entries_used` ran. `useful` is the work that the steps needed, and `padded` the work that was done,
    both in `unit`, with costs from `basis`. `wasteful` are the entries that wasted most work.
    """

    path: str
    basis: str
    num_requests: int
    num_refused: int
    num_shortened: int
    num_preemptions: int
    seconds: float
    num_steps: int
    num_entries: int
    num_entries_used: int
    unit: str
    useful: float
    padded: float
    factor: float
    wasteful: tuple[EntryUse, ...]


class ReportedUnit(Value):
    """A compiled unit. `piece` is the piece of a step that it is (layer, head, ...). Seconds are None without a record."""

    key: str
    label: str
    piece: str
    size_bytes: int
    num_programs: int
    num_entries: int
    compile_seconds: float | None
    cpu_seconds: float | None


class PieceTime(Value):
    """The time to compile the units of one piece, as a sum."""

    piece: str
    num_units: int
    num_timed: int
    compile_seconds: float
    cpu_seconds: float


class Built(Value):
    """Everything that is built in a bundle or a store (`source`). Sums are over distinct units."""

    source: Literal["bundle", "store"]
    num_units: int
    size_bytes: int
    num_timed: int
    compile_seconds: float
    cpu_seconds: float
    pieces: tuple[PieceTime, ...]
    units: tuple[ReportedUnit, ...]


class BuildPhase(Value):
    """A phase of a build. `begin` is in seconds since the build began."""

    name: str
    begin: float
    seconds: float


class BuildTime(Value):
    """How one build spent its time: its phases by the clock, and the work of its workers in seconds of all together."""

    path: str
    seconds: float
    phases: tuple[BuildPhase, ...]
    num_traced: int
    num_compiled: int
    num_workers: int
    worker_seconds: dict[str, float]


class Component(Value):
    """A named value: a component of keys, or an origin."""

    name: str
    value: str


class Upgrade(Value):
    """What a change of any of `components` would invalidate. Seconds are those of the units that have a record.

    If `is_certain`, all `num_units` are compiled again, otherwise only those whose graphs change.
    """

    what: str
    components: tuple[Component, ...]
    num_entries: int
    num_programs: int
    num_units: int
    num_untimed: int
    compile_seconds: float
    is_certain: bool


class Report(Value):
    """The whole report. `notes` say what is unknown, why, and how to find out."""

    schema_: Literal["aotgaudi.report/1"] = Field(default=REPORT_SCHEMA, alias="schema")
    subject: Subject
    entries: Entries
    coverage: ReportedCoverage
    planes: tuple[Plane, ...]
    trace: ReportedTrace | None
    built: Built | None
    build_time: BuildTime | None
    memory: Memory
    provenance: tuple[Component, ...]
    keys: tuple[Component, ...]
    upgrades: tuple[Upgrade, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
