"""The report as a value: every number that the page shows, and all that ``--json`` prints.

``report.compute`` makes it, ``report.page`` shows it. Numbers that the page shows carry their place in the JSON form,
``coverage.phases.0.num_reachable``, so that the two can be compared.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aotgaudi.document import Value
from aotgaudi.manifest.summary import Memory

REPORT_SCHEMA: Literal["aotgaudi.report/1"] = "aotgaudi.report/1"

Origin = Literal["public", "closing", "short"]
"""Why a prompt or decode entry is there: of the public table, added to close it, or a short query of the spec."""


class Subject(Value):
    """What is reported on. `path` as it was given."""

    path: str
    kind: Literal["spec", "manifest", "bundle"]
    manifest_id: str
    model: str
    backend: str
    version: str
    """Of the bucketing rules."""
    strategy: str


class KindOfEntry(Value):
    """The entries of one kind. `num_warm` None: what is built is not known."""

    kind: str
    num_entries: int
    num_warm: int | None
    num_closing: int
    largest: str


class Entries(Value):
    """All entries. `programs`: how many distinct programs they are, where that is known."""

    num_entries: int
    num_warm: int | None
    num_closing: int
    num_programs: int | None
    kinds: tuple[KindOfEntry, ...]


class Phase(Value):
    """What is proved of the steps of one kind, counted in `unit`."""

    kind: str
    unit: str
    num_reachable: int
    num_uncovered: int


class ReportedHole(Value):
    """A disjoint part of what is uncovered, and the smallest step in it: the witness."""

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
    """The proof. `holes` and `closing` are the first of `num_holes` and `num_closing`; `smallest`: of all witnesses."""

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


class PartPhase(Value):
    """Steps of one kind: how many can be formed under a part's limits, and how many under those of the spec."""

    kind: str
    num_served: int
    num_reachable: int


class PartPolicy(Value):
    """What ``serve --outside POLICY`` makes of a part: under which limits it serves, and what becomes of the rest.

    `limits` None: no server with this policy starts.
    """

    policy: str
    limits: dict[str, int] | None
    phases: tuple[PartPhase, ...]
    text: str


class ReportedPart(Value):
    """A bundle that holds a part of its manifest: `num_entries` serve, `num_cold` are not built.

    `num_settings` sampler settings of `num_settings_of_spec` are served. `is_closed`: under the limits of the policies, as
    proved for the report.
    """

    text: str
    num_entries: int
    num_cold: int
    num_settings: int
    num_settings_of_spec: int
    is_closed: bool
    policies: tuple[PartPolicy, ...]


class Axis(Value):
    """A dimension of a plane, cut into bins: bin i is of `firsts[i]` up to before `firsts[i + 1]`, the last one to `last`.

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
    """What a trace's steps did in a cell or an entry.

    `useful` is the work that they needed, `padded` what was done, in the trace's unit; `share` is this one's part, 0 to
    1, of all that the trace's steps did in vain.
    """

    num_steps: int
    useful: float
    padded: float
    share: float


class PlaneCell(Value):
    """One bin of both axes that holds steps: how many can be formed, how many of them have no entry.

    `padding` is the mean factor, 1 or more, over a sample of the cell's covered steps, None where none is;
    `num_entries` are those whose own size lies here. `traffic`: of a trace, None where it had no step here. `num_cold`:
    steps that have entries, none of which is built; None where it is not known what is.
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
    """Entries of one size but for the batch: `x` and `y` in the units of the axes. `is_warm` None: not known."""

    x: int
    y: float
    num_entries: int
    origin: Origin
    is_warm: bool | None


class MeanPadding(Value):
    """Padding over the steps that can be formed, each counted once; see ``bucketing/padding.py``."""

    mean: float
    error: float
    worst: float
    worst_step: tuple[int, int, int]
    is_sampled: bool


class Plane(Value):
    """The steps of one phase: prompts by context and query, decodes by batch and blocks.

    `points` are empty where there would be too many; `PlaneCell.num_entries` counts them all the same.
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
    """A trace as it was replayed through the scheduler of the engine, in `seconds` of simulated time.

    `num_refused` requests do not fit the limits; the answers of `num_shortened` were longer than fits. Of `num_entries` for
    prompts and decodes `num_entries_used` ran. `useful` is the work that the steps needed, `padded` what was done, both in
    `unit`, as `basis` has it; `wasteful` are the entries in which most was done in vain.
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
    """A compiled unit. `piece` is what it is of a step (layer, head, ...); seconds are None where no record holds them."""

    key: str
    label: str
    piece: str
    size_bytes: int
    num_programs: int
    num_entries: int
    compile_seconds: float | None
    cpu_seconds: float | None


class PieceTime(Value):
    """What compiling the units of one piece took, one after the other."""

    piece: str
    num_units: int
    num_timed: int
    compile_seconds: float
    cpu_seconds: float


class Built(Value):
    """What is built, by a bundle or a store: `source`. Sums are over distinct units."""

    source: Literal["bundle", "store"]
    num_units: int
    size_bytes: int
    num_timed: int
    compile_seconds: float
    cpu_seconds: float
    pieces: tuple[PieceTime, ...]
    units: tuple[ReportedUnit, ...]


class BuildPhase(Value):
    """A phase of a build; `begin` is in seconds since the build began."""

    name: str
    begin: float
    seconds: float


class BuildTime(Value):
    """Where the time of one build went: its phases by the clock, and what its workers did in seconds of all together."""

    path: str
    seconds: float
    phases: tuple[BuildPhase, ...]
    num_traced: int
    num_compiled: int
    num_workers: int
    worker_seconds: dict[str, float]


class Component(Value):
    """A named value: a component of keys, or where something came from."""

    name: str
    value: str


class Upgrade(Value):
    """What another value of any of `components` would invalidate. Seconds are those of units that have a record.

    `is_certain`: all `num_units` are compiled again; otherwise those whose graphs come out differently.
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
    """All of it. `notes` say what is not known, why, and what would tell."""

    schema_: Literal["aotgaudi.report/1"] = Field(default=REPORT_SCHEMA, alias="schema")
    subject: Subject
    entries: Entries
    coverage: ReportedCoverage
    part: ReportedPart | None
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
