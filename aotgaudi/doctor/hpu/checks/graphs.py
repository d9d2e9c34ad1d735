"""Checks of the first graphs that are compiled: their numbers, their keys, their options. All others rest on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, skipped
from aotgaudi.doctor.hpu.lab import Lab, Outcome

MAX_ERROR = 4e-2
"""Of the largest value: bfloat16 has 8 bits, and sums of some hundred products lose a few."""

NUMBERS = ("K-29", "K-37")
"""Lines without which nothing that is compiled says anything."""

PASSED_OPTIONS: Mapping[str, object] = {
    "use_eager_fallback": False,
    "keep_input_mutations": True,
    "use_graph_freezing": False,
}
"""Options of the backend that a build passes."""

_ORDER = [1, 2, 1, 0]


@dataclass(frozen=True, slots=True)
class BuiltRecipes:
    """What one process compiled: graphs 1, 2, 1 again, and 0.

    Attributes:
        directory: Where it stored them.
        outcome: What it saw.
        is_pinned: Whether FX's counter was pinned, since keys did not repeat otherwise.
        as_it_came: The outcome without pinning.
    """

    directory: Path
    outcome: Outcome
    is_pinned: bool
    as_it_came: Outcome

    def keys(self) -> frozenset[str]:
        """Returns the keys that were looked up."""
        return frozenset(key for run in self.outcome.values["runs"] for key in run["keys"])

    def again(self, lab: Lab, directory: Path, **arguments: Any) -> Outcome:
        """Returns what another process sees that runs the same graphs in another order, with `directory`."""
        return lab.run("recipes.keys", directory, order=[0, 2, 1], pin=self.is_pinned, **arguments)


def built_recipes(lab: Lab) -> BuiltRecipes:
    """Returns what one process compiled; it is asked to once in an examination."""
    return lab.kept("built", lambda: _build(lab))


def _build(lab: Lab) -> BuiltRecipes:
    directory = lab.new_directory("built")
    outcome = lab.run("recipes.keys", directory, order=_ORDER)
    if not outcome.is_whole or repeats(outcome):
        return BuiltRecipes(directory, outcome, False, outcome)
    pinned = lab.new_directory("built")
    return BuiltRecipes(pinned, lab.run("recipes.keys", pinned, order=_ORDER, pin=True), True, outcome)


def repeats(outcome: Outcome) -> bool:
    """Returns whether graph 1 had the same key after graph 2."""
    first, _, third, _ = outcome.values["runs"]
    return bool(first["keys"] == third["keys"])


def _graphs(lab: Lab) -> Iterator[LineFinding]:
    found = tuple(_numbers(lab))
    yield from found
    refuted = next((one.line for one in found if one.line in NUMBERS and one.verdict == "refuted"), None)
    if refuted is None:
        yield _options(lab)
    else:
        yield from skipped(("K-05",), f"{refuted} was refuted")


def _numbers(lab: Lab) -> Iterator[LineFinding]:
    values = built_recipes(lab).as_it_came.required()
    runs = {run["graph"]: run for run in values["runs"]}
    # Of graphs that become several clusters some may be equal, and share a key rightly.
    shared = runs[1]["keys"] if runs[1]["keys"] == runs[2]["keys"] else []
    if any(run["keys"] for run in runs.values()):
        yield judged("K-29", not shared, "other keys", f"two graphs have the key {', '.join(shared)}")
    else:
        yield from skipped(("K-29",), "keys are not told")
    if shared:
        yield from skipped(("K-37",), "K-29 was refuted")
    else:
        problem = next((run["problem"] for run in runs.values() if run["problem"]), "")
        error = max(run["error"] for run in runs.values())
        holds = not problem and error <= MAX_ERROR
        yield judged(
            "K-37", holds, f"small graphs are {error:.1e} off at most", problem or f"{error:.1e} off"
        )
    constants = values["constants"]
    yield judged("K-32", not constants, "none", f"{len(constants)} files of constants")


def _options(lab: Lab) -> LineFinding:
    refused = lab.run("lowering.options", values=dict(PASSED_OPTIONS)).required()["refused"]
    why = "; ".join(f"{name}: {problem}" for name, problem in refused.items())
    return judged("K-05", not refused, ", ".join(PASSED_OPTIONS), why)


CHECKS = (HpuCheck("H-05", "graphs, and options of the backend", (*NUMBERS, "K-32", "K-05"), _graphs),)
