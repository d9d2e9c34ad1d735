"""A builder on the double: a store, and forks that compile and prove small units for it."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu.probe import hpu_target
from aotgaudi.compile.cards import prove
from aotgaudi.compile.jobs import CompileJob, run_compile
from aotgaudi.compile.keys import ProgramRow, ProofRow, UnitRow, UnitSource, unit_key
from aotgaudi.compile.plan import Plan, ProgramState
from aotgaudi.digest import Key
from aotgaudi.errors import AotGaudiError
from aotgaudi.gaudi.environment import process_environment
from aotgaudi.graphs.program import Call, Program
from aotgaudi.store.store import Store
from tests.hpu.forks import Fork, double_environment, start_fork

SECONDS = 480.0


def environment_of(folder: Path, directory: Path, **more: str) -> Mapping[str, str]:
    """Returns the environment of a process that compiles on the double into `directory`."""
    return process_environment(double_environment(folder, **more), directory)


def text(*lines: object) -> str:
    rows = ("aotgaudi.graph/2", *lines)
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in rows)


LAYER = text(
    ["input", "float32", [4, 8], [8, 1]],
    ["input", "float32", [8, 8], [8, 1]],
    ["input", "float32", [12, 8], [8, 1]],
    ["input", "int64", [4], [1]],
    ["call", "aten.mm.default", [{"%": 0}, {"%": 1}], {}],
    ["call", "aten.index_copy_.default", [{"%": 2}, 0, {"%": 3}, {"%": 4}], {}],
    ["call", "aten.index_select.default", [{"%": 5}, 0, {"%": 3}], {}],
    ["call", "aten.relu.default", [{"%": 6}], {}],
    ["output", [{"%": 7}]],
)
OTHER = LAYER.replace("aten.relu.default", "aten.neg.default")
NOT_LOWERED = LAYER.replace(
    '"aten.relu.default",[{"%":6}]', '"aten.addcmul.default",[{"%":6},{"%":6},{"%":6}]'
)
ONE_OPERATOR = text(
    ["input", "float32", [4, 8], [8, 1]],
    ["call", "aten.relu.default", [{"%": 0}], {}],
    ["output", [{"%": 1}]],
)
LABEL = "layer (prompt, 1, 4, 0)"


class Place:
    """A store and a double, in which forks compile and prove `LAYER`."""

    def __init__(self, double: Path, root: Path) -> None:
        self.double, self.root = double, root
        self.store = Store.open(root / "store")
        self._number = 0

    def target(self) -> Target:
        synapse = "1.24.1.482.6c1b7a2" if self.double.name == "1.24.1" else "1.19.0.561.5a56187"
        return hpu_target("gaudi2", synapse, os.environ, memory=self.root)

    def in_fork(self, action: Callable[[], Any], fault: str = "", **settings: str) -> Any:
        """Returns what `action` returns beside the bridge, or the error of ours that it raises."""
        result = self.root / f"result-{self._number + 1}"

        def run() -> None:
            try:
                found = action()
            except AotGaudiError as error:
                found = error
            result.write_bytes(pickle.dumps(found))

        fork, deadline = self.started(run, fault, **settings), time.monotonic() + SECONDS
        while fork.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        fork.kill()
        assert result.exists(), (self.root / f"output-{self._number}").read_text(errors="replace")
        return pickle.loads(result.read_bytes())

    def started(self, action: Callable[[], Any], fault: str = "", **settings: str) -> Fork:
        """Starts a fork that does `action` beside the bridge, with a new directory of recipes."""
        self._number += 1
        environment = environment_of(
            self.double,
            self.root / f"recipes-{self._number}",
            AOTGAUDI_DOUBLE_FAULTS=fault,
            AOTGAUDI_DOUBLE_STATE=str(self.root),
            **settings,
        )
        return start_fork(action, environment, self.root / f"output-{self._number}")

    def job(self, graph: str = LAYER) -> CompileJob:
        digest = self.store.objects.put_bytes(graph.encode())
        key = unit_key(graph, self.target()).hex
        return CompileJob(key, str(digest), LABEL, self.target(), self.store.root, self.root / "log")

    def compiled(self, *graphs: str, fault: str = "", **settings: str) -> UnitRow | AotGaudiError:
        def compile_all() -> UnitRow:
            return [run_compile(self.job(graph)) for graph in graphs or (LAYER,)][-1]

        found: UnitRow | AotGaudiError = self.in_fork(compile_all, fault, **settings)
        return found

    def proved(self, row: UnitRow, fault: str = "", graph: str = LAYER) -> ProofRow | AotGaudiError:
        def run() -> ProofRow:
            job, more = self.job(graph), () if graph == ONE_OPERATOR else ("weight:w", "kv:0.k", "step:i")
            calls = (
                Call(unit=job.key, inputs=("step:x", *more), outputs=("h",)),
                Call(unit=job.key, inputs=("tmp:h", *more), outputs=("y",)),
            )
            program = Program(inputs=(), weights=(), caches=(), calls=calls, outputs=("y",))
            digest = self.store.objects.put_bytes(program.dumps())
            units = {job.key: UnitSource(text=job.text, label=LABEL)}
            state = ProgramState(Key.of([("a", "b")]), (), ProgramRow(program=str(digest), units=units))
            lacking = ProgramRow(program=str(digest), units={**units, "0" * 64: units[job.key]})
            states = (
                state,
                ProgramState(Key.of([("a", "c")]), (), lacking),
                ProgramState(Key.of([]), (), None),
            )
            return prove(Plan(job.target, states, {job.key: row}), self.store, SECONDS)

        found: ProofRow | AotGaudiError = self.in_fork(run, fault)
        return found
