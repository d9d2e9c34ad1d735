"""What a build of a capture prints."""

from __future__ import annotations

from pathlib import Path

from aotgaudi.cli.build_capture import CaptureSettings, residual_lines
from aotgaudi.cli.store_options import StorePlace
from tests.unit.test_templates import parse


def test_what_every_start_does_again_is_listed_and_a_long_list_is_cut() -> None:
    assert list(residual_lines(())) == []
    assert list(residual_lines(("a", "b", "c"))) == ["a", "b", "c"]
    assert list(residual_lines(("a", "b", "c", "d", "e"))) == ["a", "b", "c", "and 2 more, in the receipt"]


def test_a_shard_runs_by_a_command_of_ours_with_the_same_options() -> None:
    settings = CaptureSettings(
        exercise=("smoke",), no_repairs=True, shapes=Path("a.toml"), ready_seconds=7.0, shards=2
    )
    place = StorePlace(Path("store"), lower=(Path("below"),), trust_others=True)
    sharding = settings.sharding(place, ("vllm", "serve", "tiny", "--port", "1"))
    assert sharding is not None
    assert sharding.command is not None

    words = list(sharding.command("2/2"))

    ours = words[words.index("aotgaudi.cli.main") + 1 :]
    parse(ours)
    assert ours[:2] == ["build", "capture"]
    assert ours[ours.index("--") + 1 :] == ["vllm", "serve", "tiny", "--port", "1"]
    for option, value in (
        ("--shard", "2/2"),
        ("--shapes", "a.toml"),
        ("--store", "store"),
        ("--lower", "below"),
    ):
        assert ours[ours.index(option) + 1] == value
    assert {"--no-repairs", "--allow-unsafe-store"} <= set(ours)
