from __future__ import annotations

import pytest

from aotgaudi.commands.flags import (
    CONDITIONS,
    FLAGS,
    NEUTRAL_FLAGS,
    NEUTRAL_VARIABLES,
    SHORT_FLAGS,
    VARIABLES,
)
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.wrap.adapters.vllm import ACTED_ON


def test_every_effect_has_a_reason() -> None:
    assert all(flag.reason for flag in FLAGS.values() if flag.effect != "unread")
    assert all(row.reason for row in VARIABLES.values() if row.effect != "taken")


def test_short_forms_and_flags_that_are_acted_on_are_known() -> None:
    assert {*SHORT_FLAGS.values(), *ACTED_ON} <= set(FLAGS)


def test_what_changes_no_code_changes_no_shapes() -> None:
    assert {FLAGS[name].effect for name in NEUTRAL_FLAGS} == {"harmless", "taken"}
    assert {VARIABLES[name].effect for name in {*NEUTRAL_VARIABLES, *CONDITIONS}} == {"harmless", "unknown"}
    assert not NEUTRAL_VARIABLES.keys() & CONDITIONS.keys()


@pytest.mark.parametrize(
    ("name", "arity", "effect", "is_neutral"),
    [
        ("max-num-seqs", "value", "taken", False),
        ("served-model-name", "values", "taken", True),
        ("port", "value", "harmless", True),
        ("shutdown-timeout", "value", "harmless", True),
        ("nnodes", "value", "harmless", False),
        ("enable-dbo", "switch", "refused", False),
        ("compilation-config", "value", "unknown", False),
        ("moe-backend", "value", "unread", False),
    ],
)
def test_what_a_flag_does(name: str, arity: str, effect: str, is_neutral: bool) -> None:
    flag = FLAGS[name]

    assert (flag.arity, flag.effect, flag.is_neutral) == (arity, effect, is_neutral)


def test_a_flag_that_changes_no_code_is_read_though_no_release_for_gaudi_has_it() -> None:
    command = VllmCommand.parse("vllm serve m --shutdown-timeout 5")

    assert [(remark.name, remark.text) for remark in command.harmless] == [
        ("--shutdown-timeout", "where and how the server listens")
    ]
