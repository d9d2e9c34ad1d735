"""What a build of a capture prints."""

from __future__ import annotations

from aotgaudi.cli.build_capture import residual_lines


def test_what_every_start_does_again_is_listed_and_a_long_list_is_cut() -> None:
    assert list(residual_lines(())) == []
    assert list(residual_lines(("a", "b", "c"))) == ["a", "b", "c"]
    assert list(residual_lines(("a", "b", "c", "d", "e"))) == ["a", "b", "c", "and 2 more, in the receipt"]
