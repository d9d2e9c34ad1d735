from __future__ import annotations

from aotgaudi.cli.show import first_lines


def test_lists_are_cut_and_say_how_many_lines_are_not_shown() -> None:
    assert first_lines(["a", "b", "c"], 3, "and {} more") == ["a", "b", "c"]
    assert first_lines(["a", "b", "c", "d", "e"], 3, "and {:,} more") == ["a", "b", "c", "and 2 more"]
