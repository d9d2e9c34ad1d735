"""Checks of recipes: keys that repeat, files that another process finds, counters that tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.checks.software import release
from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, skipped, unclear
from aotgaudi.doctor.hpu.lab import Lab, Outcome
from aotgaudi.doctor.hpu.probes.recipes import copy_recipes
from aotgaudi.gaudi.recipes import RecipePair, scan

MAX_ERROR = 4e-2
"""Of the largest value: bfloat16 has 8 bits, and sums of some hundred products lose a few."""

_FIRST_RELEASE_OF_STABLE_KEYS = (1, 22)
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
    if not outcome.is_whole or _repeats(outcome):
        return BuiltRecipes(directory, outcome, False, outcome)
    pinned = lab.new_directory("built")
    return BuiltRecipes(pinned, lab.run("recipes.keys", pinned, order=_ORDER, pin=True), True, outcome)


def _repeats(outcome: Outcome) -> bool:
    first, _, third, _ = outcome.values["runs"]
    return bool(first["keys"] == third["keys"])


def _numbers(lab: Lab) -> Iterator[LineFinding]:
    outcome = built_recipes(lab).as_it_came
    if not outcome.is_whole:
        yield from unclear(("K-29", "K-37", "K-32"), outcome)
        return
    runs = {run["graph"]: run for run in outcome.values["runs"]}
    shared = set(runs[1]["keys"]) & set(runs[2]["keys"])
    if any(run["keys"] for run in runs.values()):
        yield judged("K-29", not shared, "other keys", f"two graphs have the key {next(iter(shared), '')}")
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
    constants = outcome.values["constants"]
    yield judged("K-32", not constants, "none", f"{len(constants)} files of constants")


def _metrics(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("recipes.metrics")
    if not outcome.is_whole:
        yield from unclear(("K-16", "K-12"), outcome)
        return
    values = outcome.values
    first, second = values["first"], values["second"]
    style = "told at once" if values["told_at_once"] else "told when asked"
    counts = [first["compiled"], second["compiled"]]
    yield judged("K-16", counts == [1, 0], style, f"{counts[0]} and {counts[1]} compiled, not 1 and 0")
    holds = len(first["misses"]) == 1 and second["hits"] == first["misses"]
    lacks = "hits are not those that were missed" if values["knows_recipes"] else "recipes are not counted"
    yield judged("K-12", holds, "a miss, then a hit of the same key", lacks)


def _stability(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    if not (built.as_it_came.is_whole and built.outcome.is_whole):
        yield from unclear(("K-08", "K-09"), built.outcome)
    elif not built.is_pinned:
        yield LineFinding("K-08", "confirmed", "stable: the same key after another graph")
        yield from skipped(("K-09",), "not needed, keys are stable")
    else:
        if release() >= _FIRST_RELEASE_OF_STABLE_KEYS:
            yield LineFinding("K-08", "refuted", "the same graph has another key after another graph")
        else:
            yield from skipped(("K-08",), "releases before 1.22 are known not to (K-07)")
        yield judged("K-09", _repeats(built.outcome), "pinned: the same key again", "another key, pinned too")


def _names(lab: Lab) -> Iterator[LineFinding]:
    outcome, device = built_recipes(lab).outcome, lab.kept("identity", lambda: lab.run("device.identity"))
    if not (outcome.is_whole and device.is_whole):
        yield from unclear(("K-13", "K-42"), device if outcome.is_whole else outcome)
        return
    values, capability = outcome.values, device.values["capability"]
    holds = not values["others"] and values["synapse"] == [capability]
    seen = f"V is {', '.join(values['synapse']) or 'not there'}, the capability {capability}"
    yield judged("K-13", holds, seen, f"{seen}; {len(values['others'])} files have other names")
    single = next(run["keys"] for run in values["runs"] if run["graph"] == 0)
    empty = set(single) & set(values["uncached"])
    yield judged("K-42", not empty, "it does", "its metadata is empty: it is compiled at every start")


def _reload(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    if not built.outcome.is_whole:
        yield from unclear(("K-35", "K-31"), built.outcome)
        return
    values = built.outcome.values
    stored = set(values["files"]) | set(values["uncached"])
    lacks = "a recipe was not there after it" if values["has_flush"] else "the bridge has no flush"
    yield judged("K-35", values["has_flush"] and built.keys() <= stored, "every recipe was there", lacks)
    again = built.again(lab, built.directory)
    if not again.is_whole:
        yield from unclear(("K-31",), again)
        return
    found, total = set(values["files"]) & set(again.values["total"]["hits"]), again.values["total"]
    holds = built.keys() - set(values["uncached"]) <= found and total["compiled"] <= len(values["uncached"])
    seen = f"{len(found)} of {len(values['files'])} found, {total['compiled']} compiled"
    yield judged("K-31", holds, seen)


def _read_only(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    if not built.outcome.is_whole:
        yield from unclear(("K-36", "K-26", "K-15"), built.outcome)
        return
    sealed = lab.new_directory("sealed")
    copy_recipes(built.directory, sealed)
    sealed.chmod(0o555)
    outcome = built.again(lab, sealed)
    sealed.chmod(0o755)
    yield _found_again("K-36", outcome, built)
    late = built.again(lab, lab.new_directory("late"), fill_from=str(built.directory))
    yield _found_again("K-26", late, built)
    emptied = lab.new_directory("emptied")
    copy_recipes(built.directory, emptied)
    victim = _victim(built, emptied)
    victim.metadata.write_bytes(b"")
    victim.recipe.unlink()
    outcome = built.again(lab, emptied)
    is_miss = outcome.is_whole and not outcome.values["runs"][1]["problem"]
    is_miss = is_miss and victim.key in outcome.values["total"]["misses"]
    yield judged("K-15", is_miss, "a miss", outcome.problem or _problem(outcome) or "a hit")


def _found_again(line: str, outcome: Outcome, built: BuiltRecipes) -> LineFinding:
    if not outcome.is_whole:
        return LineFinding(line, "refuted", outcome.problem)
    compiled, allowed = outcome.values["total"]["compiled"], len(built.outcome.values["uncached"])
    holds = compiled <= allowed and not _problem(outcome)
    return judged(line, holds, "found, none compiled", _problem(outcome) or f"{compiled} compiled again")


def _victim(built: BuiltRecipes, directory: Path) -> RecipePair:
    """The recipe of graph 2."""
    (keys,) = (run["keys"] for run in built.outcome.values["runs"] if run["graph"] == 2)
    return next(pair for pair in scan(directory).pairs if pair.key in keys)


def _problem(outcome: Outcome) -> str:
    return next((run["problem"] for run in outcome.values["runs"] if run["problem"]), "")


def _context(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("recipes.layers")
    if not outcome.is_whole:
        yield from unclear(("K-10",), outcome)
        return
    new = set(outcome.values["second"]) - set(outcome.values["first"])
    yield judged("K-10", not new, "one key", f"the second layer has {len(new)} of its own")


def _library_hash(lab: Lab) -> Iterator[LineFinding]:
    """Changes the bytes of a kernel library, and looks whether L follows."""
    library = lab.new_directory("kernels") / "libkernels.so"
    seen = []
    for content in (b"one", b"two"):
        library.write_bytes(content)
        outcome = lab.run("recipes.keys", order=[1], environment={"GC_KERNEL_PATH": str(library)})
        if not outcome.is_whole:
            yield from unclear(("K-38",), outcome)
            return
        seen.append(outcome.values["libraries"])
    yield judged("K-38", seen[0] == seen[1], "the same for other bytes", "it follows the bytes: a guard")


_NUMBERS = ("K-29", "K-37")
_KEYS = (*_NUMBERS, "K-09", "K-12", "K-16")
_RESTORED = (*_KEYS, "K-13", "K-31")

CHECKS = (
    HpuCheck("H-05", "graphs", ("K-29", "K-37", "K-32"), _numbers),
    HpuCheck("H-09", "metrics", ("K-16", "K-12"), _metrics, _NUMBERS),
    HpuCheck("H-06", "stable keys", ("K-08", "K-09"), _stability, (*_NUMBERS, "K-12", "K-16")),
    HpuCheck("H-07", "names of recipes", ("K-13", "K-42"), _names, _KEYS),
    HpuCheck("H-08", "recipes in another process", ("K-35", "K-31"), _reload, (*_KEYS, "K-13")),
    HpuCheck("H-10", "a read-only directory", ("K-36", "K-26", "K-15"), _read_only, _RESTORED),
    HpuCheck("H-15", "keys that depend on context", ("K-10",), _context, _KEYS),
    HpuCheck("H-23", "the hash of the libraries", ("K-38",), _library_hash, (*_KEYS, "K-13")),
)
