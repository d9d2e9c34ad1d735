"""The page of a report and of a difference: sections, tables and drawings. Computes nothing, needs no network.

Every number is a ``<data>`` element with its place in the JSON form and its value (`Numbers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aotgaudi.report.drawing import padding_figure, steps_figure
from aotgaudi.report.html import NONE, Html, Numbers, code, details, element, join, page, shown, table
from aotgaudi.report.values import (
    BuildTime,
    Built,
    Component,
    Plane,
    Report,
    ReportedCoverage,
    ReportedPart,
    ReportedTrace,
    Upgrade,
)

_MOST_UNITS = 25
_CHARACTERS_OF_ID = 16
_CHARACTERS_OF_KEY = 12


def report_page(report: Report) -> str:
    """Returns the page of a report."""
    num = Numbers(report.model_dump(mode="json", by_alias=True))
    return page(
        f"{report.subject.model} \u00b7 aotgaudi report",
        _header(report),
        _tiles(report, num),
        _warnings(report),
        _section("Steps and entries", *_steps(report, num)),
        _build_time(report.build_time, num) if report.build_time else NONE,
        _built(report.built, num) if report.built else NONE,
        _section("Memory", *_memory(report, num)),
        _section("What an upgrade would cost", *_upgrades(report.upgrades, num)) if report.upgrades else NONE,
        _section("Keys and provenance", *_keys(report)),
    )


def difference_page(document: Mapping[str, Any]) -> str:
    """Returns the page of what ``aotgaudi diff --json`` prints of two manifests."""
    num, sides = Numbers(document), (document["a"], document["b"])
    entries = [
        (kind, num(f"entries.{kind}.added"), num(f"entries.{kind}.removed"), _examples(change))
        for kind, change in document["entries"].items()
    ]
    causes = [
        (
            cause["where"],
            kind,
            num(f"causes.{i}.entries.{kind}.added"),
            num(f"causes.{i}.entries.{kind}.removed"),
        )
        for i, cause in enumerate(document["causes"])
        for kind in cause["entries"]
    ]
    problems = [
        element("p", f"{cause['where']} cannot be changed alone: {cause['problem']}")
        for cause in document["causes"]
        if cause["problem"]
    ]
    values = [(one["where"], code(one["old"]), code(one["new"])) for one in document["values"]]
    return page(
        f"{sides[0]['path']} and {sides[1]['path']} \u00b7 aotgaudi diff",
        element("h1", "What differs" if document["different"] else "No difference"),
        *(
            element(
                "p",
                f"{name.upper()}: ",
                code(side["path"]),
                ", ",
                num(f"{name}.num_entries"),
                " entries, ",
                code(side["id"][:_CHARACTERS_OF_ID]),
                class_="soft",
            )
            for name, side in zip("ab", sides, strict=True)
        ),
        _section("Values of the spec", table(("*value", "*A", "*B"), values)) if values else NONE,
        _section("Entries", table(("kind", "#came", "#went", "the first of them"), entries))
        if entries
        else NONE,
        *(element("p", f"{kind} entries are the same, in another order.") for kind in document["reordered"]),
        _section(
            "Which value caused what",
            element("p", "Each changed value was tried alone on A's spec.", class_="soft"),
            table(("*value", "kind", "#came", "#went"), causes),
            *problems,
        )
        if document["causes"]
        else NONE,
    )


def _examples(change: Mapping[str, Any]) -> str:
    return " ".join(
        [*(f"+{one}" for one in change["added_examples"]), *(f"-{one}" for one in change["removed_examples"])]
    )


def _section(title: str, *children: object) -> Html:
    return element("section", element("h2", title), *children)


def _header(report: Report) -> Html:
    subject, coverage = report.subject, report.coverage
    return element(
        "header",
        element("h1", subject.model),
        element(
            "p",
            subject.kind,
            " ",
            code(subject.path),
            f" \u00b7 {subject.backend} \u00b7 {subject.strategy} buckets of {subject.version}",
            class_="soft",
        ),
        element(
            "p",
            element(
                "strong",
                "Closed:" if coverage.is_closed else "Not closed:",
                class_="good" if coverage.is_closed else "bad",
            ),
            f" {coverage.result}.",
        ),
    )


def _tiles(report: Report, num: Numbers) -> Html:
    memory, built = report.memory, report.built
    tiles = [
        _tile(num("entries.num_entries"), "entries"),
        _tile(num("entries.num_warm"), "of them built"),
        _tile(num("entries.num_closing"), "of them close the public table"),
        _tile(num("coverage.num_holes"), "holes", class_="bad" if report.coverage.num_holes else None),
    ]
    if built:
        tiles.append(_tile(num("built.num_units"), "compiled units, ", num("built.size_bytes", "size")))
    if memory.unknown is None:
        each = (", on each of ", num("memory.num_devices"), " devices") if memory.num_devices > 1 else ()
        tiles.append(_tile(num("memory.total_bytes", "size"), "of memory besides weights", *each))
    return element("div", *tiles, class_="tiles")


def _tile(number: Html, *text: object, class_: str | None = None) -> Html:
    return element("div", element("b", number, class_=class_), element("span", *text), class_="tile")


def _warnings(report: Report) -> Html:
    if not report.warnings and not report.notes:
        return NONE
    warnings = (
        element("li", element("strong", "Warning:", class_="bad"), " ", text) for text in report.warnings
    )
    notes = (element("li", text) for text in report.notes)
    return _section("Warnings and notes", element("ul", *warnings, *notes, class_="plain"))


# Steps and entries


def _steps(report: Report, num: Numbers) -> Iterator[Html]:
    coverage = report.coverage
    scheduler = "the scheduler" if coverage.scheduler == "aotgaudi" else coverage.scheduler
    yield element(
        "p",
        f"Every step that {scheduler} can form, and the entry that runs it. An entry covers all steps that are as large"
        " or smaller: those below it and to its left.",
        class_="soft",
    )
    for index, plane in enumerate(report.planes):
        yield from _plane(plane, f"planes.{index}", num)
    if report.trace:
        yield from _trace(report.trace, num)
    if report.part:
        yield from _part(report.part, num)
    yield element("h3", "By kind")
    yield table(
        ("kind", "#entries", "#built", "#closing", "largest"),
        (
            (
                kind.kind,
                num(f"entries.kinds.{i}.num_entries"),
                num(f"entries.kinds.{i}.num_warm"),
                num(f"entries.kinds.{i}.num_closing"),
                kind.largest,
            )
            for i, kind in enumerate(report.entries.kinds)
        ),
    )
    yield from _coverage(coverage, num)


def _plane(plane: Plane, place: str, num: Numbers) -> Iterator[Html]:
    is_prompt = plane.phase == "prompt"
    yield element("h3", "Prompts" if is_prompt else "Decodes")
    axes = (
        "Query tokens after blocks of context" if is_prompt else "Blocks in all, by the number of sequences"
    )
    padded = (
        "Padding of the trace: each cell's share of all the work that was done in vain"
        if plane.traffic
        else "Padding: what the entry computes and reads, by what the step needs. Every step that can be formed counts"
        " once; no trace was given"
    )
    yield element(
        "div", steps_figure(plane, place, axes), padding_figure(plane, place, padded), class_="charts"
    )
    if plane.padding:
        padding = plane.padding
        sampled = (
            (" (of a sample, within ", num(f"{place}.padding.error", "factor"), ")")
            if padding.is_sampled
            else ()
        )
        yield element(
            "p",
            "Over every step that can be formed, each counted once, padding is ",
            num(f"{place}.padding.mean", "factor"),
            " in the mean",
            *sampled,
            ", ",
            num(f"{place}.padding.worst", "factor"),
            f" at worst, for ({', '.join(map(str, padding.worst_step))}).",
        )
    if plane.traffic:
        yield element(
            "p",
            "The trace formed ",
            num(f"{place}.traffic.num_steps"),
            " of these steps; ",
            num(f"{place}.traffic.share", "share"),
            " of what it did in vain was here.",
        )


def _trace(trace: ReportedTrace, num: Numbers) -> Iterator[Html]:
    refused = ("; ", num("trace.num_refused"), " requests do not fit the limits") if trace.num_refused else ()
    shortened = (
        ("; ", num("trace.num_shortened"), " answers were shortened to fit") if trace.num_shortened else ()
    )
    yield element("h3", "The trace")
    yield element(
        "p",
        code(trace.path),
        ": ",
        num("trace.num_requests"),
        " requests, ",
        num("trace.num_steps"),
        " steps in ",
        num("trace.seconds", "time"),
        " of simulated time, ",
        num("trace.num_preemptions"),
        " preemptions",
        *refused,
        *shortened,
        ". The device did ",
        num("trace.factor", "factor"),
        " of the work that the steps needed (",
        num("trace.padded", "work"),
        " for ",
        num("trace.useful", "work"),
        f" {trace.unit}), in ",
        num("trace.num_entries_used"),
        " of ",
        num("trace.num_entries"),
        f" entries. What steps cost is {trace.basis}.",
    )
    rows = []
    for index, use in enumerate(trace.wasteful):
        at = f"trace.wasteful.{index}.traffic"
        rows.append(
            (
                use.entry,
                num(f"{at}.num_steps"),
                num(f"{at}.useful", "work"),
                num(f"{at}.padded", "work"),
                num(f"{at}.share", "share"),
            )
        )
    heads = ("entry", "#steps", "#needed", "#done", "#share of what was in vain")
    yield details("Where most was done in vain", table(heads, rows))


def _part(part: ReportedPart, num: Numbers) -> Iterator[Html]:
    yield element("h3", "A part of its manifest")
    yield element(
        "p",
        num("part.num_entries"),
        f" entries serve, and are {'proved again to be' if part.is_closed else 'not'} closed under lower limits; ",
        num("part.num_cold"),
        " entries are not built, and ",
        num("part.num_settings"),
        " of ",
        num("part.num_settings_of_spec"),
        " sampler settings are served. What happens outside these limits depends on ",
        code("serve --outside"),
        ", which is ",
        code("refuse"),
        " by default with ",
        code("--require-warm"),
        ":",
    )
    rows = []
    for index, policy in enumerate(part.policies):
        at = f"part.policies.{index}"
        limits: list[Html] = [NONE] * 4
        if policy.limits:
            limits = [
                join(num(f"{at}.limits.max_model_len"), " tokens"),
                join(num(f"{at}.limits.max_num_batched_tokens"), " tokens"),
                num(f"{at}.limits.max_num_seqs"),
                num(f"{at}.limits.num_blocks"),
            ]
        served = [
            join(num(f"{at}.phases.{i}.num_served"), " of ", num(f"{at}.phases.{i}.num_reachable"))
            for i in range(len(policy.phases))
        ]
        rows.append((code(policy.policy), *limits, *served, *([NONE] * (2 - len(served))), policy.text))
    limits_heads = ("#sequence", "#step", "#sequences", "#KV blocks")
    yield table(("policy", *limits_heads, "#prompt cells", "#decode steps", "what lies outside"), rows)


def _coverage(coverage: ReportedCoverage, num: Numbers) -> Iterator[Html]:
    if coverage.phases:
        yield element("h3", "What is proved")
        yield table(
            ("steps", "#can be formed", "#without an entry"),
            (
                (
                    f"{phase.kind} {phase.unit}",
                    num(f"coverage.phases.{i}.num_reachable"),
                    num(f"coverage.phases.{i}.num_uncovered"),
                )
                for i, phase in enumerate(coverage.phases)
            ),
        )
    if coverage.holes:
        yield element("h3", "Holes")
        yield table(
            ("where", "#steps", "witness: the smallest of them"),
            (
                (hole.text, num(f"coverage.holes.{i}.num_uncovered"), hole.witness)
                for i, hole in enumerate(coverage.holes)
            ),
        )
        yield _more(coverage.num_holes - len(coverage.holes))
    if coverage.closing:
        unknown = element("span", "not known", class_="none")
        yield details(
            join(
                "What closes the public table: ",
                num("coverage.num_closing"),
                " entry" if coverage.num_closing == 1 else " entries",
            ),
            table(
                ("entry", "a step that only it is for"),
                (
                    (one.entry, f"({', '.join(map(str, one.witness))})" if one.witness else unknown)
                    for one in coverage.closing
                ),
            ),
            _more(coverage.num_closing - len(coverage.closing)),
        )
    if coverage.unproved:
        yield element("p", f"Of {', '.join(coverage.unproved)} entries nothing is proved.")
    for text in coverage.left_out:
        yield element("p", f"Left out of the proof: {text}.")


def _more(number: int) -> Html:
    return element("p", f"and {shown(number, 'count')} more", class_="soft") if number > 0 else NONE


# The build


def _build_time(time: BuildTime, num: Numbers) -> Html:
    phases = (
        (
            phase.name,
            num(f"build_time.phases.{i}.begin", "time"),
            num(f"build_time.phases.{i}.seconds", "time"),
        )
        for i, phase in enumerate(time.phases)
    )
    workers = ((name, num(f"build_time.worker_seconds.{name}", "time")) for name in time.worker_seconds)
    return _section(
        "Where a build's time went",
        element(
            "p",
            code(time.path),
            ": ",
            num("build_time.seconds", "time"),
            " in all, ",
            num("build_time.num_traced"),
            " programs traced and ",
            num("build_time.num_compiled"),
            " units compiled by ",
            num("build_time.num_workers"),
            " workers.",
        ),
        table(("phase", "#after", "#took"), phases),
        table(("workers, together", "#took"), workers),
    )


def _built(built: Built, num: Numbers) -> Html:
    timed = (
        "; ",
        num("built.num_timed"),
        " of them on record took ",
        num("built.compile_seconds", "time"),
        " of one worker, ",
        num("built.cpu_seconds", "time"),
        " of processors",
    )
    pieces = (
        (
            piece.piece,
            num(f"built.pieces.{i}.num_units"),
            num(f"built.pieces.{i}.num_timed"),
            num(f"built.pieces.{i}.compile_seconds", "time"),
            num(f"built.pieces.{i}.cpu_seconds", "time"),
        )
        for i, piece in enumerate(built.pieces)
    )
    units = (
        (
            unit.label,
            num(f"built.units.{i}.size_bytes", "size"),
            num(f"built.units.{i}.num_programs"),
            num(f"built.units.{i}.num_entries"),
            num(f"built.units.{i}.compile_seconds", "time"),
            code(unit.key[:_CHARACTERS_OF_KEY]),
        )
        for i, unit in enumerate(built.units[:_MOST_UNITS])
    )
    return _section(
        "Units and the build",
        element(
            "p",
            num("entries.num_programs"),
            " programs on ",
            num("built.num_units"),
            " distinct units of ",
            num("built.size_bytes", "size"),
            *(timed if built.num_timed else ()),
            ".",
        ),
        table(("piece", "#units", "#on record", "#compiling", "#processors"), pieces),
        details(
            "The largest units",
            table(("unit", "#size", "#programs", "#entries", "#compiling", "key"), units),
        ),
    )


def _memory(report: Report, num: Numbers) -> Iterator[Html]:
    memory = report.memory
    if memory.unknown is not None:
        yield element("p", f"Not known: {memory.unknown}")
        return
    budget = (
        () if memory.budget_bytes is None else (" The budget is ", num("memory.budget_bytes", "size"), ".")
    )
    yield element(
        "p",
        f"An estimate from shapes, for {'one device' if memory.num_devices == 1 else 'each device'}: the KV cache of ",
        num("memory.kv_cache_bytes", "size"),
        ", and the buffers of the largest step. Weights are not counted.",
        *budget,
    )
    names = ("activation", "kv", "mask", "logit", "total")
    yield table(
        ("largest step", "#activations", "#keys, values", "#masks", "#logits", "#in all"),
        (
            (step.entry, *(num(f"memory.steps.{i}.{name}_bytes", "size") for name in names))
            for i, step in enumerate(memory.steps)
        ),
    )


def _upgrades(upgrades: Iterable[Upgrade], num: Numbers) -> Iterator[Html]:
    yield element(
        "p",
        "If any of these had another value. A program's key holds all of them; a unit's holds the target and the text of"
        " its graph.",
        class_="soft",
    )
    rows, components = [], []
    for index, upgrade in enumerate(upgrades):
        at = f"upgrades.{index}"
        took = element("span", "not on record", class_="none")
        if upgrade.num_untimed < upgrade.num_units or not upgrade.num_units:
            untimed = (" (", num(f"{at}.num_untimed"), " not on record)") if upgrade.num_untimed else ()
            took = join(num(f"{at}.compile_seconds", "time"), *untimed)
        rows.append(
            (
                upgrade.what,
                join(num(f"{at}.num_programs"), " programs, ", num(f"{at}.num_entries"), " entries"),
                join("" if upgrade.is_certain else "at most ", num(f"{at}.num_units")),
                took,
            )
        )
        title = f"{upgrade.what}: {len(upgrade.components)} components"
        components.append(details(title, _components(upgrade.components)))
    yield table(("another value of", "#traced again", "#units compiled again", "#which took"), rows)
    yield from components


def _keys(report: Report) -> Iterator[Html]:
    yield table(("", "*"), ((one.name, code(one.value)) for one in report.provenance))
    if report.keys:
        title = f"What the keys of all programs have in common: {len(report.keys)} components"
        yield details(title, _components(report.keys))


def _components(components: Iterable[Component]) -> Html:
    return table(("", "*"), ((code(one.name), code(one.value)) for one in components))
