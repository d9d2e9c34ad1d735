"""Draws docs/images/time-to-ready.svg, the README's picture, from the measured seconds in the JSON file beside it."""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 246, 90, 66, 40
STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; } .small { font-size: 12px; fill: #59636e; }
  .cold { fill: #8c959f; } .cache { fill: #b6740a; } .bundle { fill: #1a7f5a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; }
    .cold { fill: #7d8590; } .cache { fill: #d29922; } .bundle { fill: #3fb984; }
  }
"""


def main() -> None:
    """Writes the picture, or with --check fails where it is not that of the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "images" / "time-to-ready.json")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    picture = args.figures.with_suffix(".svg")
    drawn = svg_of(json.loads(args.figures.read_bytes()))
    if not args.check:
        picture.write_text(drawn, encoding="utf-8")
    elif picture.read_text(encoding="utf-8") != drawn:
        sys.exit(f"{picture} is out of date; run: python benchmarks/draw_ready.py")


def svg_of(figures: dict[str, Any]) -> str:
    """Returns the picture: one bar for each measurement, with its seconds, and what was measured where."""
    bars = figures["bars"]
    height = TOP + len(bars) * ROW + 58
    scale = (WIDTH - LEFT - RIGHT) / max(bar["seconds"] for bar in bars)
    said = ", ".join(f"{bar['label']} {bar['seconds']} s" for bar in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(figures['title'])}: {escape(said)}</title>",
        f"<style>{STYLE}</style>",
        _text(16, 28, figures["title"], "title"),
        _text(16, 48, figures["model"], "small"),
    ]
    for number, bar in enumerate(bars):
        y, length = TOP + number * ROW, max(3.0, bar["seconds"] * scale)
        lines += [
            _text(LEFT - 12, y + 20, bar["label"], anchor="end"),
            f'<rect class="{bar["of"]}" x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="26" rx="3"/>',
            _text(LEFT + length + 8, y + 20, f"{bar['seconds']} s"),
        ]
    where = f"{figures['machine']}; {figures['versions']}; {bars[0]['date']} and {bars[-1]['date']}"
    lines += [_text(16, height - 32, where, "small"), _text(16, height - 14, figures["measured"], "small")]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, style: str = "", *, anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
