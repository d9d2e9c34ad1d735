"""Work for the fake backend: programs that are traced already, of units that take as long as their labels say.

Every compile is written to a journal by the backend itself, so that what was done twice is seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.backends.fake.probe import probe
from aotgaudi.build.keys import program_key, unit_key
from aotgaudi.build.plan import Plan, make_plan
from aotgaudi.build.records import ProgramRow, UnitSource
from aotgaudi.entries import DefragEntry, Entry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import parse_spec
from aotgaudi.store.store import Store

SPEC = """
schema = "aotgaudi.spec/1"
[model]
name = "tiny"
dtype = "float32"
config = { model_type = "llama", max_position_embeddings = 512 }
[limits]
max_num_seqs = 1
max_num_batched_tokens = 16
max_model_len = 16
block_size = 16
num_blocks = 1
[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]
[defrag]
enabled = false
[target]
backend = "fake"
"""


@dataclass(frozen=True)
class Workload:
    """One program an item of `labels`, which are those of its units; compiles are noted in `journal`."""

    labels: tuple[tuple[str, ...], ...]
    journal: Path

    @property
    def spec(self) -> BuildSpec:
        return parse_spec(SPEC, Path())

    @property
    def target(self) -> Target:
        return probe({"journal": str(self.journal)})

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(DefragEntry(number) for number in range(1, len(self.labels) + 1))

    @property
    def unit_keys(self) -> dict[str, str]:
        """Key -> label."""
        target = self.target
        return {unit_key(_text(label), target).hex: label for labels in self.labels for label in labels}

    def seed(self, store: Store) -> None:
        """Puts texts and programs into `store`, as tracing would."""
        target, spec = self.target, self.spec
        for entry, labels in zip(self.entries, self.labels, strict=True):
            keys = {label: unit_key(_text(label), target).hex for label in labels}
            calls = tuple(Call(unit=key, inputs=(), outputs=()) for key in keys.values())
            program = Program(inputs=(), weights=(), caches=(), calls=calls, outputs=())
            key = program_key(entry, spec, target)
            row = ProgramRow(
                program=str(store.objects.put_bytes(program.dumps())),
                units={
                    keys[label]: UnitSource(
                        text=str(store.objects.put_bytes(_text(label).encode())), label=label
                    )
                    for label in labels
                },
                components=dict(key.components),
            )
            store.actions.put(key.hex, row.model_dump(mode="json"))

    def plan(self, store: Store) -> Plan:
        """What `store` lacks."""
        return make_plan(self.entries, self.spec, self.target, store)

    def compiles(self) -> Counter[str]:
        """How often each unit was begun, by key."""
        return (
            Counter(self.journal.read_text(encoding="ascii").split()) if self.journal.exists() else Counter()
        )


def _text(label: str) -> str:
    return f"graph of {label}"
