"""Renders the tables of benchmarks/results/*.json into docs/benchmarks.md, between two marker comments."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, SCHEMA

BEGIN, END = "<!-- results: begin (python benchmarks/report.py) -->", "<!-- results: end -->"
ORDER = (
    "ready",
    "rebuild",
    "enumerate",
    "build",
    "decode",
    "int8",
    "vllm",
    "steps",
    "memory",
    "capture",
)


def main() -> None:
    """Writes the document, or with --check fails where it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = args.document.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{args.document} lacks the markers\n  {BEGIN}\n  {END}")
    results = [json.loads(path.read_bytes()) for path in sorted(args.results.glob("*.json"))]
    rendered = (
        f"{head}{BEGIN}\n{render([result for result in results if result['schema'] == SCHEMA])}{END}{tail}"
    )
    if args.check and rendered != text:
        sys.exit(f"{args.document} is out of date; run: python benchmarks/report.py")
    if not args.check:
        args.document.write_text(rendered, encoding="utf-8")
        print(f"{args.document}: {len(results)} results")


def render(results: list[dict[str, Any]]) -> str:
    """All results as Markdown, in the order of the guide."""
    known = [result for name in ORDER for result in results if result["name"] == name]
    others = [result for result in results if result["name"] not in ORDER]
    return "".join(_section(result) for result in (*known, *others))


def _section(result: dict[str, Any]) -> str:
    tag = f" ({result['tag']})" if result["tag"] else ""
    lines = [f"\n### {result['name']}{tag}\n", f"{_machine(result['environment'])} {result['date']}.\n"]
    return "\n".join([*lines, *(_table(table) for table in result["tables"])]) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("python", "torch", "transformers", "aotgaudi")
    )
    threads = "" if machine["threads"] is None else f" Threads: {_threads(machine['threads'])}."
    memory = machine["memory_bytes"] / 2**30
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB, {machine['os']}; {versions}.{threads}"
    )


def _threads(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_threads(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(table: dict[str, Any]) -> str:
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    note = [f"\n{table['note']}"] if table["note"] else []
    return "\n".join([f"**{table['title']}**\n", *lines, *note, ""])


if __name__ == "__main__":
    main()
