from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.change import ABSENT, ValueChange, value_changes, with_change
from tests import specs


def spec_of(*, limits: dict[str, int] | None = None, **changes: Any) -> BuildSpec:
    return specs.spec_of(
        limits={"max_num_seqs": 4, "max_num_batched_tokens": 64, **(limits or {})}, **changes
    )


def changes(old: BuildSpec, new: BuildSpec) -> list[str]:
    return [str(change) for change in value_changes(old, new)]


def test_equal_specs_have_no_changes_even_where_one_writes_a_default_out() -> None:
    assert changes(spec_of(), spec_of(defrag={"threshold": 32})) == []


def test_every_changed_value_is_named_by_its_path_in_order() -> None:
    new = spec_of(limits={"max_num_seqs": 2}, bucketing={"prompt": {"query_len": {"max": 32}}})

    assert changes(spec_of(), new) == [
        "bucketing.prompt.query_len.max: None -> 32",
        "limits.max_num_seqs: 4 -> 2",
    ]


def test_lists_and_tables_that_come_or_go_change_as_one_value() -> None:
    new = spec_of(bucketing={"sliding": {"threshold": 9}}, defrag={"padded_swaps": [3]})

    assert [change.where for change in value_changes(spec_of(), new)] == [
        "bucketing.sliding",
        "defrag.padded_swaps",
    ]


def test_a_config_key_that_comes_goes_or_changes_its_type_is_a_change() -> None:
    old, new = spec_of(config={"gone": {"y": 1}, "flag": 1}), spec_of(config={"come": None, "flag": True})

    assert changes(old, new) == [
        "model.config.come: (absent) -> None",
        "model.config.flag: 1 -> True",
        "model.config.gone: {'y': 1} -> (absent)",
    ]


def test_a_long_value_is_cut_to_one_short_line() -> None:
    text = "(1, 16, 0)\n" * 30
    (line, strategy) = changes(spec_of(), spec_of(bucketing={"strategy": "file", "file_text": text}))

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
    old = spec_of(config={"a": 5})
    new = spec_of(
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
        with_change(spec_of(), ValueChange(("limits", "num_blocks"), 24, 2))
    with pytest.raises(SpecError, match=r"model\.config\.model_type: is missing"):
        with_change(spec_of(), ValueChange(("model", "config", "model_type"), "llama", ABSENT))
