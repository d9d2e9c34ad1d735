"""Units, times and memory as plots."""

from __future__ import annotations

from aotgaudi.report.drawing import (
    INK,
    MOST_MARKS,
    PATH,
    SURFACE,
    Chart,
    Key,
    Row,
    drawn,
    nominal,
    titles_of,
    untitled,
)
from aotgaudi.report.report import BuildTime, Built, Memory

PIECES = ("layer", "head", "embedding", "sampler", "swap")
"""What has a colour of its own; anything else has one together."""


def units_chart(built: Built) -> Chart:
    """Draws units by size and compile time, or by reuse where no time is known."""
    rows: list[Row] = [
        {
            "size": unit.size_bytes / 1024,
            "seconds": unit.compile_seconds,
            "entries": unit.num_entries,
            "piece": _piece(unit.piece),
            "path": f"built.units.{index}",
            "title": f"{unit.label}: {unit.size_bytes:,} bytes, used by {unit.num_entries:,} entries"
            + (f", compiled in {unit.compile_seconds:.1f} s" if unit.compile_seconds is not None else ""),
        }
        for index, unit in enumerate(built.units[:MOST_MARKS])
    ]
    timed = [row for row in rows if row["seconds"] is not None]
    y = ("seconds", "compile seconds") if timed else ("entries", "entries that use it")
    shown = timed or rows
    pieces = [piece for piece in (*PIECES, "other") if any(row["piece"] == piece for row in shown)]
    encoding = {
        "x": {
            "field": "size",
            "type": "quantitative",
            "title": "KiB",
            "axis": {"tickCount": 5},
            "scale": {"zero": False},
        },
        "y": {"field": y[0], "type": "quantitative", "title": y[1], "axis": {"tickCount": 5}},
        "color": nominal("piece", {piece: _piece_colour(piece) for piece in pieces}),
        **PATH,
    }
    if timed:
        encoding["size"] = {
            "field": "entries",
            "type": "quantitative",
            "scale": {"type": "sqrt", "range": [25, 260]},
            "legend": None,
        }
    mark = {"type": "point", "filled": True, "opacity": 0.75, "stroke": SURFACE, "strokeWidth": 0.5}
    spec = {"data": {"values": [untitled(row) for row in shown]}, "mark": mark, "encoding": encoding}
    legend = tuple(Key(_piece_variable(piece), piece, "dot") for piece in pieces)
    return Chart(drawn(spec, titles_of(shown)), legend)


def time_chart(built: Built) -> Chart:
    """Draws what compiling the units of each piece took."""
    rows: list[Row] = [
        {
            "piece": row.piece,
            "seconds": row.compile_seconds,
            "colour": _piece(row.piece),
            "path": f"built.pieces.{index}",
            "title": f"{row.piece}: {row.num_timed:,} units in {row.compile_seconds:,.1f} s",
        }
        for index, row in enumerate(built.pieces)
        if row.num_timed
    ]
    names = {_piece(row["piece"]): _piece_colour(_piece(row["piece"])) for row in rows}
    spec = {
        "height": 26 * max(1, len(rows)),
        "data": {"values": [untitled(row) for row in rows]},
        "mark": {"type": "bar", "cornerRadiusEnd": 2},
        "encoding": {
            "y": {"field": "piece", "type": "nominal", "title": None, "sort": None},
            "x": {"field": "seconds", "type": "quantitative", "title": "seconds of one worker"},
            "color": nominal("colour", names),
            **PATH,
        },
    }
    return Chart(drawn(spec, titles_of(rows)))


def build_chart(time: BuildTime) -> Chart:
    """Draws the phases of a build one below the other, by the clock."""
    rows: list[Row] = [
        {
            "phase": phase.name,
            "begin": phase.begin,
            "end": phase.begin + phase.seconds,
            "path": f"build_time.phases.{index}",
            "title": f"{phase.name}: {phase.seconds:,.2f} s, from {phase.begin:,.2f} s on",
        }
        for index, phase in enumerate(time.phases)
    ]
    spec = {
        "height": 26 * max(1, len(rows)),
        "data": {"values": [untitled(row) for row in rows]},
        "mark": {"type": "bar", "cornerRadius": 2, "color": "var(--c1)", "stroke": "var(--c1)"},
        "encoding": {
            "y": {"field": "phase", "type": "nominal", "title": None, "sort": None},
            "x": {"field": "begin", "type": "quantitative", "title": "seconds since the build began"},
            "x2": {"field": "end"},
            **PATH,
        },
    }
    return Chart(drawn(spec, titles_of(rows)))


_BUFFERS = (
    ("kv_cache_bytes", "KV cache", "--c1"),
    ("activation_bytes", "activations", "--c2"),
    ("kv_bytes", "gathered keys and values", "--c3"),
    ("mask_bytes", "masks", "--c4"),
    ("logit_bytes", "logits", "--c5"),
)


def memory_chart(memory: Memory) -> Chart:
    """Draws the KV cache with the buffers of the largest step of each kind, and the budget."""
    rows: list[Row] = [
        {
            "step": step.kind,
            "what": what,
            "order": order,
            "bytes": (memory.kv_cache_bytes if name == "kv_cache_bytes" else getattr(step, name)) / 2**20,
            "path": "memory.kv_cache_bytes" if name == "kv_cache_bytes" else f"memory.steps.{index}.{name}",
        }
        for index, step in enumerate(memory.steps)
        for order, (name, what, _) in enumerate(_BUFFERS)
    ]
    titles = {row["path"]: f"{row['what']}: {row['bytes']:,.1f} MiB" for row in rows}
    x = {"type": "quantitative", "title": "MiB", "axis": {"tickCount": 5}}
    y = {"field": "step", "type": "nominal", "title": None, "sort": None}
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar"},
        "encoding": {
            "y": y,
            "x": {"field": "bytes", **x},
            "color": nominal("what", {what: f"var({colour})" for _, what, colour in _BUFFERS}),
            "order": {"field": "order", "type": "quantitative"},
            **PATH,
        },
    }
    layers: list[Row] = [bars]
    if memory.budget_bytes is not None:
        layers.append(
            {
                "data": {"values": [{"budget": memory.budget_bytes / 2**20, "path": "memory.budget_bytes"}]},
                "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": [4, 3], "color": INK},
                "encoding": {"x": {"field": "budget", **x}, **PATH},
            }
        )
        titles["memory.budget_bytes"] = f"budget: {memory.budget_bytes:,} bytes"
    legend = [Key(colour, what) for _, what, colour in _BUFFERS]
    if memory.budget_bytes is not None:
        legend.append(Key("--ink", "budget", "rule"))
    spec = {"height": 34 * max(1, len(memory.steps)), "layer": layers}
    return Chart(drawn(spec, titles), tuple(legend))


def _piece(piece: str) -> str:
    return piece if piece in PIECES else "other"


def _piece_variable(piece: str) -> str:
    return f"--c{(*PIECES, 'other').index(piece) + 1}"


def _piece_colour(piece: str) -> str:
    return f"var({_piece_variable(piece)})"
