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

from aotgaudi.doctor.hpu.bridge import SHAPES, Bridge, difference, graph, one_line, recipe_directory, told
from aotgaudi.doctor.hpu.device import identity, release
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, Outcome, judged, skipped
from aotgaudi.gaudi.identity import KERNELS_VARIABLE
from aotgaudi.gaudi.recipes import RecipePair, scan

MAX_ERROR = 4e-2
"""Relative to the largest value: bfloat16 has 8 bits, and sums of some hundred products lose a few."""

NUMBERS = ("K-29", "K-37")
"""Lines without which no compiled result has a meaning."""

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
        directory: Where it stored the recipes.
        outcome: What it observed.
        is_pinned: Whether FX's counter was pinned, because keys did not repeat otherwise.
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
        """Returns what another process observes that runs the same graphs in another order, with `directory`."""
        return lab.run("recipes.keys", directory, order=[0, 2, 1], pin=self.is_pinned, **arguments)


def built_recipes(lab: Lab) -> BuiltRecipes:
    """Returns what one process compiled. An examination compiles only once."""
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
    # A graph may become several clusters. Equal clusters rightly share a key.
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


GRAPH_CHECKS = (HpuCheck("H-05", "graphs, and options of the backend", (*NUMBERS, "K-32", "K-05"), _graphs),)

_FIRST_RELEASE_OF_STABLE_KEYS = (1, 22)
_DUMPS = "*.hash_content"
_MOST_SHOWN = 400


def _metrics(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("recipes.metrics").required()
    first, second = values["first"], values["second"]
    style = "told at once" if values["told_at_once"] else "told when asked"
    counts = [first["compiled"], second["compiled"]]
    seen = f"{counts[0]} and, when they were found, {counts[1]} counted"
    yield judged("K-16", counts[0] > 0 and not counts[1], style, seen)
    holds = bool(first["misses"]) and second["hits"] == first["misses"]
    lacks = "hits are not those that were missed" if values["knows_recipes"] else "recipes are not counted"
    yield judged("K-12", holds, "a miss, then a hit of the same key", lacks)


def _stability(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    built.as_it_came.required()
    built.outcome.required()
    if not built.is_pinned:
        yield LineFinding("K-08", "confirmed", "stable: the same key after another graph")
        yield from skipped(("K-09",), "not needed, keys are stable")
    else:
        if release() >= _FIRST_RELEASE_OF_STABLE_KEYS:
            yield LineFinding("K-08", "refuted", "the same graph has another key after another graph")
        else:
            yield from skipped(("K-08",), "releases before 1.22 are known not to (K-07)")
        yield judged("K-09", repeats(built.outcome), "pinned: the same key again", "another key, pinned too")


def _names(lab: Lab) -> Iterator[LineFinding]:
    values = built_recipes(lab).outcome.required()
    capability = identity(lab).required()["capability"]
    holds = not values["others"] and values["synapse"] == [capability]
    seen = f"V is {', '.join(values['synapse']) or 'not there'}, the capability {capability}"
    yield judged("K-13", holds, seen, f"{seen}; {len(values['others'])} files have other names")
    single = next(run["keys"] for run in values["runs"] if run["graph"] == 0)
    empty = set(single) & set(values["uncached"])
    yield judged("K-42", not empty, "it does", "its metadata is empty: it is compiled at every start")


def _reload(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    values = built.outcome.required()
    stored = set(values["files"]) | set(values["uncached"])
    lacks = "a recipe was not there after it" if values["has_flush"] else "the bridge has no flush"
    yield judged("K-35", values["has_flush"] and built.keys() <= stored, "every recipe was there", lacks)
    again = built.again(lab, built.directory).required()
    total = again["total"]
    found = set(values["files"]) & set(total["hits"])
    holds = built.keys() - set(values["uncached"]) <= found and total["compiled"] <= len(values["uncached"])
    seen = f"{len(found)} of {len(values['files'])} found, {total['compiled']} compiled"
    has_other_keys = not built.keys() & {key for run in again["runs"] for key in run["keys"]}
    why = _why_keys_differ(lab, built) if has_other_keys else ""
    yield judged("K-31", holds, seen, f"{seen}{why}")


def _why_keys_differ(lab: Lab, built: BuiltRecipes) -> str:
    """Returns the parts of one graph's key in which two processes differ, as the bridge dumps them (K-14)."""
    dumps = []
    for _ in range(2):
        directory = lab.new_directory("dumped")
        dump = {"PT_RECIPE_CACHE_DUMP_DEBUG": "true"}
        lab.run("recipes.keys", directory, order=[1], pin=built.is_pinned, environment=dump).required()
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in directory.glob(_DUMPS))
        dumps.append({line.strip() for text in texts for line in text.splitlines()})
    if not all(dumps):
        return "; the bridge does not tell what keys are made of"
    differing = "; ".join(sorted(dumps[0] ^ dumps[1]))
    return f"; keys differ in: {differing[:_MOST_SHOWN]}"


def _read_only(lab: Lab) -> Iterator[LineFinding]:
    built = built_recipes(lab)
    built.outcome.required()
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
    victim = _victim(built, emptied)
    victim.metadata.write_bytes(b"")
    victim.recipe.unlink()
    outcome = built.again(lab, emptied)
    is_miss = outcome.is_whole and not outcome.values["runs"][1]["problem"]
    is_miss = is_miss and victim.key in outcome.values["total"]["misses"]
    yield judged("K-15", is_miss, "a miss", outcome.problem or _problem(outcome) or "a hit")


def _if_bound(finding: LineFinding, lab: Lab) -> LineFinding:
    """Skips a confirmed finding for root, who may write to any directory. The double goes by the mode alone."""
    if finding.verdict != "confirmed" or os.geteuid() or identity(lab).required()["is_double"]:
        return finding
    return LineFinding(
        finding.line, "skipped", "permissions do not bind this user (uid 0): run doctor as another as well"
    )


def _found_again(line: str, outcome: Outcome, built: BuiltRecipes) -> LineFinding:
    if not outcome.is_whole:
        return LineFinding(line, "unclear" if outcome.is_busy else "refuted", outcome.problem)
    compiled, allowed = outcome.values["total"]["compiled"], len(built.outcome.values["uncached"])
    holds = compiled <= allowed and not _problem(outcome)
    return judged(line, holds, "found, none compiled", _problem(outcome) or f"{compiled} compiled again")


def _victim(built: BuiltRecipes, directory: Path) -> RecipePair:
    """Returns the recipe of graph 2."""
    (keys,) = (run["keys"] for run in built.outcome.values["runs"] if run["graph"] == 2)
    return next(pair for pair in scan(directory).pairs if pair.key in keys)


def _problem(outcome: Outcome) -> str:
    return next((run["problem"] for run in outcome.values["runs"] if run["problem"]), "")


def _context(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("recipes.layers").required()
    new = set(values["second"]) - set(values["first"])
    yield judged("K-10", not new, "one key", f"the second layer has {len(new)} of its own")


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


_KEYS = (*NUMBERS, "K-09", "K-12", "K-16")
_RESTORED = (*_KEYS, "K-13", "K-31")

RECIPE_CHECKS = (
    HpuCheck("H-09", "metrics", ("K-16", "K-12"), _metrics, NUMBERS),
    HpuCheck("H-06", "stable keys", ("K-08", "K-09"), _stability, (*NUMBERS, "K-12", "K-16")),
    HpuCheck("H-07", "names of recipes", ("K-13", "K-42"), _names, _KEYS),
    HpuCheck("H-08", "recipes in another process", ("K-35", "K-31"), _reload, (*_KEYS, "K-13")),
    HpuCheck("H-10", "a read-only directory", ("K-36", "K-26", "K-15"), _read_only, _RESTORED),
    HpuCheck("H-15", "keys that depend on context", ("K-10",), _context, _KEYS),
    HpuCheck("H-23", "the hash of the libraries", ("K-38",), _library_hash, (*_KEYS, "K-13")),
)


# Probes


_PIN_STEP = 1_000_000
_WARM_UP = 9


def probe_keys(order: Sequence[int], pin: bool = False, fill_from: str = "") -> Mapping[str, Any]:
    """Runs several graphs. Returns the keys that each looked up, and how far results are from the CPU's.

    Args:
        order: The numbers of the graphs, in order.
        pin: Whether FX's counter of modules begins at a number that belongs to the graph (K-09).
        fill_from: A directory whose recipes are copied into this process's after the bridge is imported.
    """
    bridge = Bridge()
    if fill_from:
        copy_recipes(Path(fill_from), recipe_directory())
    if pin:
        _run(bridge, _WARM_UP, pin)  # Counts what the front end counts once per process.
    runs = [_run(bridge, number, pin) for number in order]
    has_flush = bridge.flush()
    return {"runs": runs, "has_flush": has_flush, "total": told(bridge.counts()), **_directory()}


def _run(bridge: Bridge, number: int, pin: bool) -> Mapping[str, Any]:
    bridge.forget()
    inputs, before = bridge.random(SHAPES), bridge.counts()
    if pin:
        bridge.torch.fx.graph_module._loader.next_id = _PIN_STEP * (number + 1)
    error, problem = 0.0, ""
    try:
        error = difference(bridge.compiled(graph(number))(*bridge.placed(*inputs)), graph(number)(*inputs))
    except (
        Exception
    ) as raised:  # For example another graph's recipe. Looked-up keys are reported all the same.
        problem = one_line(raised)
    found = sorted(bridge.counts().since(before).recipes)
    return {"graph": number, "keys": found, "error": error, "problem": problem}


def copy_recipes(source: Path, target: Path) -> None:
    """Copies the complete pairs of one directory into another."""
    for pair in scan(source).pairs:
        for name, path in pair.files():
            shutil.copyfile(path, target / name)


def _directory() -> Mapping[str, Any]:
    found = scan(recipe_directory())
    return {
        "files": sorted(pair.key for pair in found.pairs),
        "uncached": list(found.uncached),
        "constants": list(found.constants),
        "others": list(found.others),
        "libraries": sorted({pair.libraries for pair in found.pairs}),
        "synapse": sorted({pair.synapse for pair in found.pairs}),
    }


def probe_metrics() -> Mapping[str, Any]:
    """Runs a graph twice. Returns the counts of both runs, and whether the bridge reports them at once."""
    bridge = Bridge()
    told_at_once: list[str] = []
    metric = bridge.module("hpu.metrics").metric_global("graph_compilation")
    metric.on_metric_change(lambda changed: told_at_once.append(changed.name()))
    run, inputs = bridge.compiled(graph(3)), bridge.placed(*bridge.random(SHAPES))
    counts = [bridge.counts()]
    for _ in range(2):
        run(*inputs)
        counts.append(bridge.counts())
    return {
        "first": told(counts[1].since(counts[0])),
        "second": told(counts[2].since(counts[1])),
        "knows_recipes": bridge.counters.knows_recipes,
        "told_at_once": bool(told_at_once),
    }


def probe_layers() -> Mapping[str, Any]:
    """Runs two equal layers in sequence. Returns the keys that each looked up."""
    bridge = Bridge()
    run = bridge.compiled(graph(4))
    x, w = bridge.placed(*bridge.random(SHAPES))
    found = []
    for _ in range(2):
        before = bridge.counts()
        x = run(x, w)
        found.append(sorted(bridge.counts().since(before).recipes))
    return {"first": found[0], "second": found[1]}
