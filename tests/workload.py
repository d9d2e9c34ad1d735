"""Work for the fake backend: programs that are traced already, of units that do what their labels say. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.backends.fake import probe
from aotgaudi.compile.keys import ProgramKeys, ProgramRow, UnitSource, unit_key
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.compile.run import BuildOutcome, Progress, Watch, run_plan
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Done, Job, LocalPool
from aotgaudi.digest import Key
from aotgaudi.entries import DefragEntry, Entry, SamplerEntry
from aotgaudi.errors import AotGaudiError
from aotgaudi.graphs.program import Call, Program
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import parse_spec
from aotgaudi.store.store import Store
from tests.specs import ONE_BLOCK, spec_toml

SPEC_TEXT = spec_toml(
    limits=ONE_BLOCK,
    rest="""
[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]
[defrag]
enabled = false
[target]
backend = "fake"
""",
)
FAKE = probe()


def tiny_spec() -> BuildSpec:
    """A spec of a few entries for the fake backend."""
    return parse_spec(SPEC_TEXT, Path())


def program_key(entry: Entry, spec: BuildSpec, target: Target) -> Key:
    """The key of the program of `entry`."""
    return ProgramKeys(spec, target).of(entry)


def text_of(label: str) -> str:
    """The canonical text that `seed` gives to the unit with this label."""
    return f"graph of {label}"


def key_of(label: str, target: Target = FAKE) -> str:
    """The key of the unit that `seed` makes for this label."""
    return unit_key(text_of(label), target).hex


def num_outputs(entry: Entry) -> int:
    """How many outputs a server takes of a program of `entry`."""
    if isinstance(entry, SamplerEntry):
        return 4 if entry.signature.logprobs else 1
    return 0 if isinstance(entry, DefragEntry) else 1


def seed(
    store: Store,
    spec: BuildSpec,
    entries: Iterable[Entry],
    labels: Sequence[Sequence[str]],
    target: Target = FAKE,
) -> None:
    """Records one traced program a distinct key: program i calls units with ``labels[i]`` (the last, later)."""
    keys = {key.hex: (key, entry) for entry in entries for key in [program_key(entry, spec, target)]}
    for index, (key, entry) in enumerate(keys.values()):
        mine = labels[min(index, len(labels) - 1)]
        calls = tuple(
            Call(unit=key_of(label, target), inputs=(), outputs=(f"{n}",)) for n, label in enumerate(mine)
        )
        program = Program(
            inputs=(), weights=(), caches=(), calls=calls, outputs=calls[-1].outputs * num_outputs(entry)
        )
        row = ProgramRow(
            program=str(store.objects.put_bytes(program.dumps())),
            units={
                key_of(label, target): UnitSource(
                    text=str(store.objects.put_bytes(text_of(label).encode())), label=label
                )
                for label in mine
            },
            components=dict(key.components),
        )
        store.actions.put(key.hex, row.model_dump(mode="json"))


def seeded_plan(store: Store, labels: Sequence[Sequence[str]], target: Target = FAKE) -> Plan:
    """A plan over one program an item of `labels`, all of them traced."""
    spec = tiny_spec()
    entries = [DefragEntry(number) for number in range(1, len(labels) + 1)]
    seed(store, spec, entries, labels, target)
    return make_plan(entries, spec, target, store)


def execute(
    store: Store,
    plan: Plan,
    workers: int = 2,
    *,
    spec: BuildSpec | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    timeout_seconds: float = UNIT_TIMEOUT_SECONDS,
) -> BuildOutcome:
    """Runs a plan of `spec`, by default `tiny_spec`, with processes of this machine; with 0 `workers`, in this process."""
    pool = (
        PoolInThisProcess(1)
        if not workers
        else LocalPool(workers, store.root / "toolcache", timeout_seconds=timeout_seconds)
    )
    return run_plan(plan, spec or tiny_spec(), store, pool, Watch(on_progress, should_stop))


class PoolInThisProcess:
    """In the place of `LocalPool`: a job is done when it is submitted."""

    def __init__(self, num_workers: int, *_: object, **__: object) -> None:
        self.num_workers, self._done = num_workers, list[Done]()

    def __enter__(self) -> PoolInThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, ticket: int, job: Job) -> None:
        """See `Pool.submit`."""
        try:
            self._done.append(Done(ticket, job.run()))
        except AotGaudiError as error:
            self._done.append(Done(ticket, error=error))

    def withdraw(self) -> list[int]:
        """See `Pool.withdraw`."""
        return []

    def wait(self, _: float) -> list[Done]:
        """See `Pool.wait`."""
        done, self._done = self._done, []
        return done


def journaled(path: Path) -> Target:
    """The fake target whose compiler notes in `path` what it compiles, so that what is done twice is seen."""
    return probe({"journal": str(path)})


def compiles(path: Path) -> Counter[str]:
    """How often each unit was begun, by key, as the journal says."""
    return Counter(path.read_text(encoding="ascii").split()) if path.exists() else Counter()


@dataclass(frozen=True)
class Workload:
    """One program an item of `labels`, which are those of its units; compiles are noted in `journal`."""

    labels: tuple[tuple[str, ...], ...]
    journal: Path

    @property
    def spec(self) -> BuildSpec:
        """What the programs are of."""
        return tiny_spec()

    @property
    def target(self) -> Target:
        """See `journaled`."""
        return journaled(self.journal)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One a program."""
        return tuple(DefragEntry(number) for number in range(1, len(self.labels) + 1))

    @property
    def unit_keys(self) -> dict[str, str]:
        """Key -> label."""
        return {key_of(label, self.target): label for labels in self.labels for label in labels}

    def seed(self, store: Store) -> None:
        """Puts texts and programs into `store`, as tracing would."""
        seed(store, self.spec, self.entries, self.labels, self.target)

    def plan(self, store: Store) -> Plan:
        """What `store` lacks."""
        return make_plan(self.entries, self.spec, self.target, store)

    def compiles(self) -> Counter[str]:
        """See `compiles`."""
        return compiles(self.journal)
