from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.difference import (
    ABSENT,
    OTHER_RULES,
    TOGETHER,
    Difference,
    ValueChange,
    difference,
    value_changes,
    with_change,
)
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from tests.specs import ONE_SEQUENCE, spec_of


def manifest_of(
    *, config: dict[str, Any] | None = None, tables: dict[str, Any] | None = None, **limits: int
) -> Manifest:
    """With the public table as it is, so that the entries here do not depend on how holes are closed."""
    return Manifest.of(
        spec_of(
            config=config,
            limits={**ONE_SEQUENCE, **limits},
            **{"bucketing": {"coverage": "upstream"}, **(tables or {})},
        )
    )


def lines(old: Manifest, new: Manifest) -> list[str]:
    return list(difference(old, new).lines())


def causes(found: Difference) -> dict[str, dict[str, tuple[int, int]]]:
    return {cause.where: cause.effect.counts() for cause in found.causes}


def test_equal_manifests_have_no_difference() -> None:
    found = difference(manifest_of(), manifest_of())

    assert not found
    assert list(found.lines()) == []


def test_a_changed_limit_its_entries_and_that_it_caused_them_are_named() -> None:
    assert lines(manifest_of(), manifest_of(max_model_len=48)) == [
        "limits.max_model_len: 32 -> 48",
        "prompt entries: +2 (prompt, 1, 16, 2) (prompt, 1, 32, 2)",
        "decode entries: +1 (decode, 1, 1, 3)",
        "cause: limits.max_model_len: prompt +2, decode +1",
    ]
    assert lines(manifest_of(max_model_len=48), manifest_of())[1:] == [
        "prompt entries: -2 (prompt, 1, 16, 2) (prompt, 1, 32, 2)",
        "decode entries: -1 (decode, 1, 1, 3)",
        "cause: limits.max_model_len: prompt -2, decode -1",
    ]


def test_many_entries_are_counted_and_only_some_shown() -> None:
    line = next(row for row in lines(manifest_of(), manifest_of(max_num_seqs=2)) if "sampler" in row)

    assert line.startswith("sampler entries: +18 (sampler, 2, 0.0, 1.0, 0, True) ")
    assert line.endswith(" ...")
    assert line.count("(sampler") == 3


def test_of_several_changed_values_each_one_has_what_it_does_alone() -> None:
    upstream = {"coverage": "upstream"}
    old = manifest_of(tables={"bucketing": upstream, "defrag": {"enabled": True, "threshold": 1}})
    new = manifest_of(
        max_model_len=48,
        tables={"bucketing": upstream, "defrag": {"enabled": True, "threshold": 1, "padded_swaps": [2, 4]}},
    )

    found = difference(old, new)

    assert causes(found) == {
        "defrag.padded_swaps": {"defrag": (2, 1)},
        "limits.max_model_len": {"prompt": (2, 0), "decode": (1, 0)},
    }


def test_a_value_without_effect_is_no_cause() -> None:
    found = difference(manifest_of(), manifest_of(max_model_len=48, num_blocks=33))

    assert "limits.num_blocks" in [change.where for change in found.values]
    assert "limits.num_blocks" not in causes(found)


def test_what_only_several_values_do_together_is_said() -> None:
    """A longer model, and more sequences: the decodes of both."""
    old, new = manifest_of(num_blocks=64), manifest_of(num_blocks=64, max_num_seqs=4, max_model_len=128)

    found = difference(old, new)

    alone = [
        difference(old, manifest_of(num_blocks=64, **{n: v}))
        for n, v in (("max_num_seqs", 4), ("max_model_len", 128))
    ]
    explained = {entry for single in alone for entry in single.entries.added}
    (joint,) = [cause for cause in found.causes if cause.where == TOGETHER]
    assert set(joint.effect.added) == set(found.entries.added) - explained
    assert DecodeEntry(4, 1, 32) in joint.effect.added


def test_a_value_that_cannot_be_changed_alone_is_said() -> None:
    found = difference(manifest_of(num_blocks=2), manifest_of(num_blocks=4, max_model_len=64))

    (cause,) = [cause for cause in found.causes if cause.where == "limits.max_model_len"]
    assert str(cause).startswith(
        "limits.max_model_len: cannot be changed alone: limits.num_blocks: is 2, too few"
    )
    assert TOGETHER in causes(found)


@given(st.integers(1, 4), st.integers(32, 100), st.integers(7, 40), st.integers(1, 9))
def test_causes_name_every_entry_that_differs_and_none_that_does_not(
    num_seqs: int, model_len: int, num_blocks: int, swaps: int
) -> None:
    old = manifest_of()
    new = manifest_of(
        tables={"bucketing": {"coverage": "upstream"}, "defrag": {"enabled": True, "padded_swaps": [swaps]}},
        max_num_seqs=num_seqs,
        max_model_len=model_len,
        num_blocks=num_blocks,
    )

    found = difference(old, new)

    added = {entry for cause in found.causes for entry in cause.effect.added}
    removed = {entry for cause in found.causes for entry in cause.effect.removed}
    assert added == set(found.entries.added) == set(new.entries) - set(old.entries)
    assert removed == set(found.entries.removed) == set(old.entries) - set(new.entries)


def test_another_order_of_the_same_entries_is_a_difference() -> None:
    manifest = manifest_of()
    turned = Manifest(manifest.spec, (manifest.entries[1], manifest.entries[0], *manifest.entries[2:]))

    assert lines(manifest, turned) == ["prompt entries: in another order"]


def test_entries_that_the_same_spec_no_longer_gives_are_the_doing_of_other_rules() -> None:
    manifest = manifest_of()
    older = Manifest(manifest.spec, manifest.entries[1:])

    assert causes(difference(older, manifest)) == {OTHER_RULES: {"prompt": (1, 0)}}
    assert causes(difference(manifest, older)) == {OTHER_RULES: {"prompt": (0, 1)}}


def test_config_keys_that_do_nothing_are_changes_and_no_causes() -> None:
    found = difference(manifest_of(), manifest_of(config={"x": {"y": 1}, "z": 2}, max_model_len=48))

    assert [change.where for change in found.values] == [
        "limits.max_model_len",
        "model.config.x",
        "model.config.z",
    ]
    assert list(causes(found)) == ["limits.max_model_len"]
    assert lines(manifest_of(), manifest_of(config={"x": {"y": 1}})) == [
        "model.config.x: (absent) -> {'y': 1}"
    ]


def test_a_config_key_that_is_in_the_way_of_another_value_is_named() -> None:
    """A longer model length needs more positions: neither explains the entries alone."""
    new = manifest_of(max_model_len=1024, num_blocks=64, config={"max_position_embeddings": 1024})

    found = difference(manifest_of(num_blocks=64), new)

    assert [(cause.where, bool(cause.problem)) for cause in found.causes] == [
        ("limits.max_model_len", True),
        (TOGETHER, False),
    ]


# Changed values of a spec


def changed_spec(*, limits: dict[str, int] | None = None, **changes: Any) -> BuildSpec:
    return spec_of(limits={"max_num_seqs": 4, "max_num_batched_tokens": 64, **(limits or {})}, **changes)


def changes(old: BuildSpec, new: BuildSpec) -> list[str]:
    return [str(change) for change in value_changes(old, new)]


def test_equal_specs_have_no_changes_even_where_one_writes_a_default_out() -> None:
    assert changes(changed_spec(), changed_spec(defrag={"threshold": 32})) == []


def test_every_changed_value_is_named_by_its_path_in_order() -> None:
    new = changed_spec(limits={"max_num_seqs": 2}, bucketing={"prompt": {"query_len": {"max": 32}}})

    assert changes(changed_spec(), new) == [
        "bucketing.prompt.query_len.max: None -> 32",
        "limits.max_num_seqs: 4 -> 2",
    ]


def test_lists_and_tables_that_come_or_go_change_as_one_value() -> None:
    new = changed_spec(bucketing={"sliding": {"threshold": 9}}, defrag={"padded_swaps": [3]})

    assert [change.where for change in value_changes(changed_spec(), new)] == [
        "bucketing.sliding",
        "defrag.padded_swaps",
    ]


def test_a_config_key_that_comes_goes_or_changes_its_type_is_a_change() -> None:
    old, new = (
        changed_spec(config={"gone": {"y": 1}, "flag": 1}),
        changed_spec(config={"come": None, "flag": True}),
    )

    assert changes(old, new) == [
        "model.config.come: (absent) -> None",
        "model.config.flag: 1 -> True",
        "model.config.gone: {'y': 1} -> (absent)",
    ]


def test_a_long_value_is_cut_to_one_short_line() -> None:
    text = "(1, 16, 0)\n" * 30
    (line, strategy) = changes(
        changed_spec(), changed_spec(bucketing={"strategy": "file", "file_text": text})
    )

    assert strategy == "bucketing.strategy: exponential -> file"
    assert line.startswith("bucketing.file_text: None -> (1, 16, 0) (1, 16, 0)")
    assert line.endswith("...")
    assert len(line) < 110


BOUND = st.none() | st.integers(0, 9)


@given(
    st.integers(1, 4),
    st.integers(1, 99),
    BOUND,
    BOUND,
    st.sampled_from([{}, {"a": 1}, {"a.b": 2, "c": {"d": 3}}]),
)
def test_all_changes_one_after_the_other_lead_from_one_spec_to_the_other(
    num_seqs: int, threshold: int, low: int | None, high: int | None, config: dict[str, Any]
) -> None:
    old = changed_spec(config={"a": 5})
    new = changed_spec(
        config=config,
        limits={"max_num_seqs": num_seqs},
        defrag={"threshold": threshold},
        bucketing={"prompt": {"query_len": {"min": low}}, "decode": {"num_blocks": {"max": high}}},
    )

    found = value_changes(old, new)
    result = old
    for change in found:
        result = with_change(result, change)

    assert result.to_json() == new.to_json()


def test_a_change_that_contradicts_the_rest_is_refused() -> None:
    with pytest.raises(SpecError, match=r"limits\.num_blocks: is 2, too few"):
        with_change(changed_spec(), ValueChange(("limits", "num_blocks"), 24, 2))
    with pytest.raises(SpecError, match=r"model\.config\.model_type: is missing"):
        with_change(changed_spec(), ValueChange(("model", "config", "model_type"), "llama", ABSENT))
