"""Checks and probes of recipes: the first graphs and their keys, files that another process finds, counters.

All other checks rely on the results and keys of the first graphs (`built_recipes`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.bridge import MAX_ERROR, Bridge, attempted, difference, graph, refusal, told
from aotgaudi.doctor.hpu.device import device_of
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, Outcome, check, judged, probe, skipped
from aotgaudi.gaudi.environment import COMPILE_OPTIONS, recipe_directory
from aotgaudi.gaudi.identity import KERNELS_VARIABLE
from aotgaudi.gaudi.recipes import scan

CHECKS: list[HpuCheck] = []

NUMBERS = ("K-29", "K-37")
"""Lines without which no compiled result has a meaning."""
_STORED = (*NUMBERS, "K-08", "K-12", "K-16")
_RESTORED = (*_STORED, "K-13", "K-31")

_ORDER = [1, 2, 1, 0]
_MOST_SHOWN = 400


@dataclass(frozen=True, slots=True)
class BuiltRecipes:
    """What one process compiled (graphs 1, 2, 1 again, and 0), and the directory where it stored the recipes."""

    directory: Path
    outcome: Outcome

    def keys(self) -> frozenset[str]:
        """Returns the keys that were looked up."""
        return frozenset(key for run in self.outcome.values["runs"] for key in run["keys"])

    def again(self, lab: Lab, directory: Path, **arguments: Any) -> Outcome:
        """Returns what another process observes that runs the same graphs in another order, with `directory`."""
        return lab.run("recipes.keys", directory, order=[0, 2, 1], **arguments)


def built_recipes(lab: Lab) -> BuiltRecipes:
    """Returns what one process compiled. An examination compiles only once. Raises ProbeFailedError."""

    def build() -> BuiltRecipes:
        directory = lab.new_directory("built")
        return BuiltRecipes(directory, lab.run("recipes.keys", directory, order=_ORDER))

    built = lab.kept("built", build)
    built.outcome.required()
    return built


def _repeats(values: Mapping[str, Any]) -> bool:
    """Returns whether graph 1 had the same key after graph 2."""
    first, _, third, _ = values["runs"]
    return bool(first["keys"] == third["keys"])


@check(CHECKS, "H-05", "graphs, and options of the backend", *NUMBERS, "K-32", "K-05")
def _graphs(lab: Lab) -> Iterator[LineFinding]:
    values = built_recipes(lab).outcome.values
    constants = values["constants"]
    yield judged("K-32", not constants, "none", f"{len(constants)} files of constants")
    runs = {run["graph"]: run for run in values["runs"]}
    # A graph may become several clusters. Equal clusters rightly share a key.
    shared = runs[1]["keys"] if runs[1]["keys"] == runs[2]["keys"] else []
    if shared:
        yield judged("K-29", False, f"two graphs have the key {', '.join(shared)}")
        yield from skipped(("K-37", "K-05"), "K-29 was refuted")
        return
    if any(run["keys"] for run in runs.values()):
        yield judged("K-29", True, "other keys")
    else:
        yield from skipped(("K-29",), "keys are not told")
    problem, error = _problem(values), max(run["error"] for run in runs.values())
    if problem or error > MAX_ERROR:
        yield judged("K-37", False, problem or f"{error:.1e} off")
        yield from skipped(("K-05",), "K-37 was refuted")
        return
    yield judged("K-37", True, f"small graphs are {error:.1e} off at most")
    refused = lab.run("recipes.options").required()
    why = "; ".join(f"{name}: {problem}" for name, problem in refused.items())
    yield judged("K-05", not refused, ", ".join(COMPILE_OPTIONS), why)


@probe(CHECKS, "H-09", "metrics", "K-16", "K-12", needs=NUMBERS)
def metrics(bridge: Bridge) -> Iterator[LineFinding]:
    """Runs a graph twice, and compares the counts of both runs."""
    told_at_once: list[str] = []
    metric = bridge.module("hpu.metrics").metric_global("graph_compilation")
    metric.on_metric_change(lambda changed: told_at_once.append(changed.name()))
    run, inputs = bridge.compiled(graph(3)), bridge.placed(*bridge.random())
    counts = [bridge.counts()]
    for _ in range(2):
        run(*inputs)
        counts.append(bridge.counts())
    first, second = counts[1].since(counts[0]), counts[2].since(counts[1])
    style = "told at once" if told_at_once else "told when asked"
    seen = f"{first.compiled} and, when they were found, {second.compiled} counted"
    yield judged("K-16", first.compiled > 0 and not second.compiled, style, seen)
    holds = bool(first.misses) and second.hits.keys() == first.misses.keys()
    knows = bridge.counters.knows_recipes
    lacks = "hits are not those that were missed" if knows else "recipes are not counted"
    yield judged("K-12", holds, "a miss, then a hit of the same key", lacks)


@check(CHECKS, "H-06", "stable keys", "K-08", "K-09", needs=(*NUMBERS, "K-12", "K-16"))
def _stability(lab: Lab) -> Iterator[LineFinding]:
    if _repeats(built_recipes(lab).outcome.values):
        yield judged("K-08", True, "stable: the same key after another graph")
        yield from skipped(("K-09",), "not needed, keys are stable")
        return
    yield judged("K-08", False, "the same graph has another key after another graph")
    pinned = lab.run("recipes.keys", order=_ORDER, pin=True).required()
    yield judged("K-09", _repeats(pinned), "pinned: the same key again", "another key, pinned too")


@check(CHECKS, "H-07", "names of recipes", "K-13", "K-42", needs=_STORED)
def _names(lab: Lab) -> Iterator[LineFinding]:
    values = built_recipes(lab).outcome.values
    capability = device_of(lab).required()["capability"]
    holds = not values["others"] and values["synapse"] == [capability]
    seen = f"V is {', '.join(values['synapse']) or 'not there'}, the capability {capability}"
    yield judged("K-13", holds, seen, f"{seen}; {len(values['others'])} files have other names")
    single = next(run["keys"] for run in values["runs"] if run["graph"] == 0)
    empty = set(single) & set(values["uncached"])
    yield judged("K-42", not empty, "it does", "its metadata is empty: it is compiled at every start")


@check(CHECKS, "H-08", "recipes in another process", "K-35", "K-31", needs=(*_STORED, "K-13"))
def _reload(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    values = built.outcome.values
    stored = set(values["files"]) | set(values["uncached"])
    lacks = "a recipe was not there after it" if values["has_flush"] else "the bridge has no flush"
    yield judged("K-35", values["has_flush"] and built.keys() <= stored, "every recipe was there", lacks)
    again = built.again(lab, built.directory).required()
    total = again["total"]
    found = set(values["files"]) & set(total["hits"])
    holds = built.keys() - set(values["uncached"]) <= found and total["compiled"] <= len(values["uncached"])
    seen = f"{len(found)} of {len(values['files'])} found, {total['compiled']} compiled"
    has_other_keys = not built.keys() & {key for run in again["runs"] for key in run["keys"]}
    yield judged("K-31", holds, seen, f"{seen}{_why_keys_differ(lab) if has_other_keys else ''}")


def _why_keys_differ(lab: Lab) -> str:
    """Returns the parts of one graph's key in which two processes differ, as the bridge dumps them (K-14)."""
    dumps = []
    for _ in range(2):
        directory = lab.new_directory("dumped")
        dump = {"PT_RECIPE_CACHE_DUMP_DEBUG": "true"}
        lab.run("recipes.keys", directory, order=[1], environment=dump).required()
        texts = (path.read_text("utf-8", "replace") for path in directory.glob("*.hash_content"))
        dumps.append({line.strip() for text in texts for line in text.splitlines()})
    if not all(dumps):
        return "; the bridge does not tell what keys are made of"
    return f"; keys differ in: {'; '.join(sorted(dumps[0] ^ dumps[1]))[:_MOST_SHOWN]}"


@check(CHECKS, "H-10", "a read-only directory", "K-36", "K-26", "K-15", needs=_RESTORED)
def _read_only(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    sealed = lab.new_directory("sealed")
    copy_recipes(built.directory, sealed)
    sealed.chmod(0o555)
    outcome = built.again(lab, sealed)
    sealed.chmod(0o755)
    yield _if_bound(_found_again("K-36", outcome, built), lab)
    late = built.again(lab, lab.new_directory("late"), fill_from=str(built.directory))
    yield _found_again("K-26", late, built)
    emptied = lab.new_directory("emptied")
    copy_recipes(built.directory, emptied)
    (keys,) = (run["keys"] for run in built.outcome.values["runs"] if run["graph"] == 2)
    victim = next(pair for pair in scan(emptied).pairs if pair.key in keys)
    victim.metadata.write_bytes(b"")
    victim.recipe.unlink()
    outcome = built.again(lab, emptied)
    problem = outcome.problem or _problem(outcome.values)
    is_miss = not problem and victim.key in outcome.values["total"]["misses"]
    yield judged("K-15", is_miss, "a miss", problem or "a hit")


def _if_bound(finding: LineFinding, lab: Lab) -> LineFinding:
    """Skips a confirmed finding for root, who may write to any directory. The double goes by the mode alone."""
    if finding.verdict != "confirmed" or os.geteuid() or device_of(lab).required()["is_double"]:
        return finding
    reason = "permissions do not bind this user (uid 0): run doctor as another as well"
    return LineFinding(finding.line, "skipped", reason)


def _found_again(line: str, outcome: Outcome, built: BuiltRecipes) -> LineFinding:
    if not outcome.is_whole:
        return LineFinding(line, "unclear" if outcome.is_busy else "refuted", outcome.problem)
    compiled, allowed = outcome.values["total"]["compiled"], len(built.outcome.values["uncached"])
    problem = _problem(outcome.values) or ("" if compiled <= allowed else f"{compiled} compiled again")
    return judged(line, not problem, "found, none compiled", problem)


def _problem(values: Mapping[str, Any]) -> str:
    return next((run["problem"] for run in values["runs"] if run["problem"]), "")


@probe(CHECKS, "H-15", "keys that depend on context", "K-10", needs=_STORED)
def layers(bridge: Bridge) -> Iterator[LineFinding]:
    """Runs two equal layers in sequence, and compares the keys that each looked up."""
    run = bridge.compiled(graph(4))
    x, w = bridge.placed(*bridge.random())
    found = []
    for _ in range(2):
        before = bridge.counts()
        x = run(x, w)
        found.append(bridge.counts().since(before).recipes)
    new = found[1] - found[0]
    yield judged("K-10", not new, "one key", f"the second layer has {len(new)} of its own")


@check(CHECKS, "H-23", "the hash of the libraries", "K-38", needs=(*_STORED, "K-13"))
def _library_hash(lab: Lab) -> Iterator[LineFinding]:
    """Changes the bytes of a kernel library and checks whether L changes. No loader reads the appended bytes."""
    named = [Path(part) for part in lab.inherited(KERNELS_VARIABLE).split(":") if part]
    if not named or not named[0].is_file():
        yield from skipped(("K-38",), f"{KERNELS_VARIABLE} names no library that could be changed")
        return
    library = lab.new_directory("kernels") / named[0].name
    shutil.copyfile(named[0], library)
    kernels = ":".join(map(str, (library, *named[1:])))
    seen = []
    for _ in range(2):
        values = lab.run("recipes.keys", order=[1], environment={KERNELS_VARIABLE: kernels}).required()
        seen.append(values["libraries"])
        with library.open("ab") as writer:
            writer.write(b"\0")
    yield judged("K-38", seen[0] == seen[1], "the same for other bytes", "it follows the bytes: a guard")


_PIN_STEP = 1_000_000
_WARM_UP = 9


def keys(bridge: Bridge, order: Sequence[int], pin: bool = False, fill_from: str = "") -> Mapping[str, Any]:
    """Runs several graphs. Returns the keys that each looked up, and how far results are from the CPU's.

    Args:
        bridge: The bridge.
        order: The numbers of the graphs, in order.
        pin: Whether FX's counter of modules begins at a number that belongs to the graph (K-09).
        fill_from: A directory whose recipes are copied into this process's after the bridge is imported.
    """
    if fill_from:
        bridge.module("utils.debug")  # Imports the bridge, with what reads the directory.
        copy_recipes(Path(fill_from), recipe_directory())
    if pin:
        _run(bridge, _WARM_UP, pin)  # Counts what the front end counts once per process.
    runs = [_run(bridge, number, pin) for number in order]
    has_flush, found = bridge.flush(), scan(recipe_directory())
    return {
        "runs": runs,
        "has_flush": has_flush,
        "total": told(bridge.counts()),
        "files": sorted(pair.key for pair in found.pairs),
        "uncached": list(found.uncached),
        "constants": list(found.constants),
        "others": list(found.others),
        "libraries": sorted({pair.libraries for pair in found.pairs}),
        "synapse": sorted({pair.synapse for pair in found.pairs}),
    }


def _run(bridge: Bridge, number: int, pin: bool) -> Mapping[str, Any]:
    bridge.forget()
    inputs, before = bridge.random(), bridge.counts()
    if pin:
        bridge.torch.fx.graph_module._loader.next_id = _PIN_STEP * (number + 1)
    # Another graph's recipe may be found, and raise. Keys that were looked up are reported all the same.
    error, problem = attempted(
        lambda: difference(bridge.compiled(graph(number))(*bridge.placed(*inputs)), graph(number)(*inputs))
    )
    found = sorted(bridge.counts().since(before).recipes)
    return {"graph": number, "keys": found, "error": error or 0.0, "problem": problem}


def copy_recipes(source: Path, target: Path) -> None:
    """Copies the complete pairs of one directory into another."""
    for pair in scan(source).pairs:
        for name, path in pair.files():
            shutil.copyfile(path, target / name)


def options(bridge: Bridge) -> Mapping[str, str]:
    """Compiles with each option. Returns which were refused, and why."""
    inputs, refused = bridge.placed(*bridge.random()), {}
    for name, value in COMPILE_OPTIONS.items():
        bridge.forget()
        run = bridge.compiled(graph(2), **{name: value})
        refused[name] = refusal(run, *inputs)
    return {name: problem for name, problem in refused.items() if problem}
