from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.buckets import BucketingEnvironment
from aotgaudi.spec.bucketing import AxisBounds, SlidingSpec, VersionName

NEWEST = "vllm-gaudi@091bbad"
V0_19_1 = "vllm-gaudi@v0.19.1"
V0_17_1 = "vllm-gaudi@v0.17.1"
V0_10_1 = "vllm-gaudi@v0.10.1"
GAUDI_1_22 = "vllm-hpu-extension@8211e0b"
AD55828 = "vllm-hpu-extension@ad55828"
GAUDI_1_21 = "vllm-hpu-extension@29bc7a4"
VERSIONS = get_args(VersionName)
PLUGINS = [name for name in VERSIONS if name.startswith("vllm-gaudi@")]
NAMED = ["vllm-gaudi@091bbad", "vllm-gaudi@v0.24.0", "vllm-gaudi@v0.21.0", "vllm-gaudi@v0.20.0rc0"]
UNIFIED = [f"vllm-gaudi@{tag}" for tag in ("v0.17.1", "v0.16.0", "v0.14.1", "v0.13.0", "v0.11.2")]

PARAMETERS = ("MIN", "STEP", "MAX", "LIMIT", "PAD_MAX", "PAD_PERCENT")
AXES = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_SEQ", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK")
BOUNDS = [f"VLLM_{axis}_BUCKET_{parameter}" for axis in AXES for parameter in PARAMETERS]
OTHERS = [
    "VLLM_DECODE_QUERY_BUCKET_MIN",
    "VLLM_PROMPT_BLOCK_BUCKET_MAX",
    "VLLM_EXPONENTIAL_BUCKETING",
    "VLLM_CONTIGUOUS_PA",
    "VLLM_PREFIX_CACHING",
    "VLLM_MERGED_PREFILL",
    "VLLM_UNIFIED_ATTN",
    "VLLM_ENABLE_BUCKETING",
    "VLLM_BUCKETING_FROM_FILE",
    "PT_HPU_SDPA_QKV_SLICE_MODE_FWD",
    "PT_HPU_SDPA_BC_FACTOR",
    "VLLM_FUSEDSDPA_SLIDE_THLD",
]


def parse(version: str = NEWEST, *, caching: bool | None = None, **environment: str) -> BucketingEnvironment:
    return BucketingEnvironment.parse(environment, version, enable_prefix_caching=caching)


def reason(environment: BucketingEnvironment, name: str) -> str:
    return next(one.reason for one in environment.ignored if one.name == name)


def test_an_empty_environment_of_the_newest_version() -> None:
    found = parse()

    assert (found.strategy, found.contiguous_pa, found.prefix_caching) == ("exponential", False, True)
    assert (found.merged_prefill, found.unified, found.sliding, found.file) == (False, False, None, None)
    assert (found.is_enabled, found.max_num_prefill_seqs, found.ignored) == (True, None, ())


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"bucketing.version: is 'v9' \(known: vllm-gaudi@091bbad, "):
        parse("v9")


@pytest.mark.parametrize("version", [name for name in VERSIONS if name not in (AD55828, GAUDI_1_21)][:-1])
def test_the_default_is_exponential_from_8211e0b_on(version: str) -> None:
    assert parse(version).strategy == "exponential"


@pytest.mark.parametrize("version", [AD55828, GAUDI_1_21, "vllm-hpu-extension@2b4ba56"])
def test_the_older_extensions_are_linear_unless_asked(version: str) -> None:
    assert parse(version).strategy == "linear"
    assert parse(version, VLLM_EXPONENTIAL_BUCKETING="true").strategy == "exponential"


def test_only_the_word_true_counts_in_gaudi_1_21() -> None:
    assert parse(AD55828, VLLM_EXPONENTIAL_BUCKETING="1").strategy == "exponential"

    found = parse(GAUDI_1_21, VLLM_EXPONENTIAL_BUCKETING="1")

    assert found.strategy == "linear"
    assert found.notes == (
        "VLLM_EXPONENTIAL_BUCKETING is '1', which upstream reads as false (true is: true)",
    )


@pytest.mark.parametrize("version", NAMED)
@pytest.mark.parametrize(
    ("name", "strategy"), [("exp", "exponential"), ("lin", "linear"), ("pad", "padding_aware")]
)
def test_a_strategy_by_name(version: str, name: str, strategy: str) -> None:
    assert parse(version, VLLM_BUCKETING_STRATEGY=name).strategy == strategy


@pytest.mark.parametrize("name", ["exponential", "EXP", "", "pad ", "exponential_bucketing"])
@pytest.mark.parametrize("beside", ["VLLM_BUCKETING_FROM_FILE", "VLLM_EXPONENTIAL_BUCKETING", "X"])
def test_another_name_is_refused_as_the_plugin_refuses_it(name: str, beside: str) -> None:
    with pytest.raises(SpecError, match=r"VLLM_BUCKETING_STRATEGY: is .* \(one of exp, lin, pad\)"):
        parse(VLLM_BUCKETING_STRATEGY=name, **{beside: "1"})


@pytest.mark.parametrize("version", [V0_19_1, V0_17_1, "vllm-gaudi@v0.11.2"])
def test_before_v0_21_other_names_exist_and_are_ignored(version: str) -> None:
    found = parse(version, VLLM_BUCKETING_STRATEGY="linear_bucketing")

    assert found.strategy == "exponential"
    assert (
        reason(found, "VLLM_BUCKETING_STRATEGY") == f"{version} chooses by VLLM_EXPONENTIAL_BUCKETING alone"
    )
    with pytest.raises(SpecError, match="is 'lin': the plugin does not start"):
        parse(version, VLLM_BUCKETING_STRATEGY="lin")


@pytest.mark.parametrize(("flag", "strategy"), [("true", "exponential"), ("0", "linear"), ("", "linear")])
def test_the_older_flag_comes_before_the_name(flag: str, strategy: str) -> None:
    found = parse(VLLM_BUCKETING_STRATEGY="pad", VLLM_EXPONENTIAL_BUCKETING=flag)

    assert found.strategy == strategy
    assert "VLLM_EXPONENTIAL_BUCKETING is set" in reason(found, "VLLM_BUCKETING_STRATEGY")


def test_a_bucket_file_comes_before_both() -> None:
    found = parse(
        VLLM_BUCKETING_FROM_FILE="b.txt", VLLM_EXPONENTIAL_BUCKETING="true", VLLM_PROMPT_QUERY_BUCKET_MIN="1"
    )

    assert (found.strategy, found.file) == ("file", "b.txt")
    assert found.prompt.query_len == AxisBounds()
    assert {one.name for one in found.ignored} == {
        "VLLM_EXPONENTIAL_BUCKETING",
        "VLLM_PROMPT_QUERY_BUCKET_MIN",
    }


def test_an_empty_path_is_no_file() -> None:
    assert parse(VLLM_BUCKETING_FROM_FILE="").strategy == "exponential"


@pytest.mark.parametrize("version", [V0_10_1, GAUDI_1_22, AD55828])
def test_versions_without_bucket_files_ignore_one(version: str) -> None:
    found = parse(version, VLLM_BUCKETING_FROM_FILE="b.txt")

    assert found.strategy != "file"
    assert "reads no bucket file" in reason(found, "VLLM_BUCKETING_FROM_FILE")


@pytest.mark.parametrize("version", UNIFIED)
def test_unified_attention_turns_contiguous_pa_and_merged_prefill_on(version: str) -> None:
    found = parse(version, VLLM_UNIFIED_ATTN="true", VLLM_BUCKETING_FROM_FILE="b.txt")

    assert found.unified
    assert (found.strategy, found.contiguous_pa, found.merged_prefill) == ("unified", True, True)
    assert found.prefix_caching
    assert reason(found, "VLLM_BUCKETING_FROM_FILE") == "unified attention has its own strategy"


def test_unified_attention_yields_to_what_is_set() -> None:
    found = parse(V0_17_1, VLLM_UNIFIED_ATTN="1", VLLM_CONTIGUOUS_PA="false", VLLM_MERGED_PREFILL="no")

    assert (found.unified, found.contiguous_pa, found.merged_prefill) == (True, False, False)


@pytest.mark.parametrize("version", [name for name in VERSIONS if name not in UNIFIED])
def test_other_versions_have_no_unified_attention(version: str) -> None:
    found = parse(version, VLLM_UNIFIED_ATTN="true")

    assert not found.unified
    assert "no unified attention" in reason(found, "VLLM_UNIFIED_ATTN")


@pytest.mark.parametrize("caching", [None, True, False])
def test_unset_contiguous_pa_is_off_whatever_the_command_says(caching: bool | None) -> None:
    found = parse(caching=caching)

    assert not found.contiguous_pa
    assert found.prefix_caching is (caching is not False)


def test_contiguous_pa_turns_prefix_caching_off() -> None:
    found = parse(VLLM_CONTIGUOUS_PA="1", caching=True)

    assert (found.contiguous_pa, found.prefix_caching) == (True, False)


def test_the_undocumented_override_of_prefix_caching_decides_contiguous_pa() -> None:
    assert parse(VLLM_PREFIX_CACHING="false").contiguous_pa
    assert not parse(VLLM_PREFIX_CACHING="false", VLLM_CONTIGUOUS_PA="false").contiguous_pa


@pytest.mark.parametrize(("caching", "contiguous"), [(True, False), (False, True), (None, True)])
def test_in_the_extension_contiguous_pa_is_on_without_prefix_caching(
    caching: bool | None, contiguous: bool
) -> None:
    found = parse(GAUDI_1_22, caching=caching)

    assert (found.contiguous_pa, found.prefix_caching) == (contiguous, bool(caching))


def test_in_the_extension_both_may_be_on() -> None:
    found = parse(GAUDI_1_22, caching=True, VLLM_CONTIGUOUS_PA="true")

    assert (found.contiguous_pa, found.prefix_caching) == (True, True)


def test_v0_10_1_has_prefix_caching_by_default() -> None:
    assert (parse(V0_10_1).contiguous_pa, parse(V0_10_1).prefix_caching) == (False, True)


def test_gaudi_1_21_has_contiguous_pa_by_default() -> None:
    assert parse(GAUDI_1_21, caching=True).contiguous_pa
    assert not parse(GAUDI_1_21, VLLM_CONTIGUOUS_PA="1").contiguous_pa


@pytest.mark.parametrize("version", PLUGINS[:-1])
def test_the_batch_bucket_is_the_prefill_batch_from_v0_11_2_on(version: str) -> None:
    found = parse(version, VLLM_PROMPT_BS_BUCKET_MAX="4")

    assert found.max_num_prefill_seqs == 4
    assert "VLLM_PROMPT_BS_BUCKET_MAX" not in {one.name for one in found.ignored}


@pytest.mark.parametrize("version", [V0_10_1, GAUDI_1_22])
def test_before_it_is_not(version: str) -> None:
    found = parse(version, VLLM_PROMPT_BS_BUCKET_MAX="4")

    assert found.max_num_prefill_seqs is None
    assert reason(found, "VLLM_PROMPT_BS_BUCKET_MAX") == "the exponential strategy does not read it"


def test_a_prefill_batch_of_none_is_refused() -> None:
    with pytest.raises(SpecError, match="VLLM_PROMPT_BS_BUCKET_MAX: is 0"):
        parse(VLLM_PROMPT_BS_BUCKET_MAX="0")


def test_merged_prefill_sets_the_prefill_batch_itself() -> None:
    found = parse(VLLM_MERGED_PREFILL="on", VLLM_BUCKETING_STRATEGY="lin", VLLM_PROMPT_BS_BUCKET_MAX="4")

    assert (found.merged_prefill, found.max_num_prefill_seqs) == (True, None)
    assert reason(found, "VLLM_PROMPT_BS_BUCKET_MAX") == "merged prefill sets it"


def test_exponential_heeds_two_bounds_and_ignores_the_rest() -> None:
    values = dict.fromkeys(BOUNDS, "1")
    found = parse(**values)

    assert found.prompt.query_len == AxisBounds(min=1)
    assert found.prompt.num_ctx_blocks == AxisBounds(max=1)
    assert (found.prompt.batch_size, found.decode.batch_size, found.decode.num_blocks) == (AxisBounds(),) * 3
    heeded = {"VLLM_PROMPT_QUERY_BUCKET_MIN", "VLLM_PROMPT_CTX_BUCKET_MAX", "VLLM_PROMPT_BS_BUCKET_MAX"}
    assert {one.name for one in found.ignored} == set(BOUNDS) - heeded


def test_exponential_heeds_no_query_other_than_one_and_no_alias() -> None:
    found = parse(VLLM_PROMPT_QUERY_BUCKET_MIN="128", VLLM_PROMPT_SEQ_BUCKET_MIN="1")

    assert found.prompt.query_len == AxisBounds()
    assert (
        reason(found, "VLLM_PROMPT_QUERY_BUCKET_MIN") == "of the exponential strategy only the value 1 counts"
    )
    assert reason(found, "VLLM_PROMPT_SEQ_BUCKET_MIN").endswith("reads VLLM_PROMPT_QUERY_BUCKET_MIN only")


@pytest.mark.parametrize("version", ["vllm-gaudi@v0.11.2", V0_10_1, GAUDI_1_22])
def test_a_query_of_one_counts_from_v0_13_on(version: str) -> None:
    assert parse("vllm-gaudi@v0.13.0", VLLM_PROMPT_QUERY_BUCKET_MIN="1").prompt.query_len.min == 1
    assert parse(version, VLLM_PROMPT_QUERY_BUCKET_MIN="1").prompt.query_len.min is None


def test_the_greatest_context_counts_from_v0_16_on() -> None:
    assert parse("vllm-gaudi@v0.16.0", VLLM_PROMPT_CTX_BUCKET_MAX="9").prompt.num_ctx_blocks.max == 9
    assert parse("vllm-gaudi@v0.14.1", VLLM_PROMPT_CTX_BUCKET_MAX="9").prompt.num_ctx_blocks.max is None


def test_limits_count_in_the_exponential_strategy_up_to_ad55828() -> None:
    values = {f"VLLM_{axis}_BUCKET_LIMIT": "7" for axis in AXES}
    found = parse(AD55828, VLLM_EXPONENTIAL_BUCKETING="true", **values)

    assert found.prompt.batch_size == found.prompt.query_len == AxisBounds(limit=7)
    assert found.decode.batch_size == found.decode.num_blocks == AxisBounds(limit=7)
    assert {one.name for one in found.ignored} == {
        "VLLM_PROMPT_QUERY_BUCKET_LIMIT",
        "VLLM_PROMPT_CTX_BUCKET_LIMIT",
    }
    assert "no longer reads limits" in reason(parse(GAUDI_1_22, **values), "VLLM_DECODE_BS_BUCKET_LIMIT")


def test_linear_reads_three_parameters_of_all_axes() -> None:
    values = {name: str(index) for index, name in enumerate(BOUNDS, start=1)}
    found = parse(VLLM_BUCKETING_STRATEGY="lin", **values)

    assert found.prompt.batch_size == AxisBounds(min=1, step=2, max=3)
    assert found.prompt.query_len == AxisBounds(min=7, step=8, max=9)
    assert found.prompt.num_ctx_blocks == AxisBounds(min=19, step=20, max=21)
    assert found.decode.batch_size == AxisBounds(min=25, step=26, max=27)
    assert found.decode.num_blocks == AxisBounds(min=31, step=32, max=33)
    assert reason(found, "VLLM_DECODE_BS_BUCKET_PAD_MAX") == "the linear strategy does not read it"
    assert reason(found, "VLLM_PROMPT_SEQ_BUCKET_MAX").startswith("VLLM_PROMPT_QUERY_BUCKET_MAX is set")


def test_padding_aware_reads_five() -> None:
    values = {name: "5" for name in BOUNDS if "SEQ" not in name}
    found = parse(VLLM_BUCKETING_STRATEGY="pad", **values)

    whole = AxisBounds(min=5, step=5, max=5, pad_max=5, pad_percent=5)
    assert found.prompt.batch_size == found.prompt.query_len == found.prompt.num_ctx_blocks == whole
    assert found.decode.batch_size == found.decode.num_blocks == whole


def test_the_alias_fills_in_what_the_name_leaves_unset() -> None:
    found = parse(
        VLLM_BUCKETING_STRATEGY="lin", VLLM_PROMPT_QUERY_BUCKET_MIN="256", VLLM_PROMPT_SEQ_BUCKET_STEP="512"
    )

    assert found.prompt.query_len == AxisBounds(min=256, step=512)
    assert found.ignored == ()


def test_older_linear_knows_the_alias_only_and_no_context() -> None:
    found = parse(
        GAUDI_1_22,
        VLLM_EXPONENTIAL_BUCKETING="false",
        VLLM_PROMPT_SEQ_BUCKET_STEP="512",
        VLLM_PROMPT_QUERY_BUCKET_STEP="256",
        VLLM_PROMPT_CTX_BUCKET_STEP="4",
    )

    assert found.prompt.query_len == AxisBounds(step=512)
    assert found.prompt.num_ctx_blocks == AxisBounds()
    assert reason(found, "VLLM_PROMPT_QUERY_BUCKET_STEP").endswith("reads VLLM_PROMPT_SEQ_BUCKET_STEP")
    assert reason(found, "VLLM_PROMPT_CTX_BUCKET_STEP").endswith("no bounds of the context")


def test_merged_prefill_keeps_the_least_query_and_the_step() -> None:
    values = {name: "8" for name in BOUNDS if "SEQ" not in name}
    found = parse(VLLM_BUCKETING_STRATEGY="lin", VLLM_MERGED_PREFILL="true", **values)

    assert found.prompt.batch_size == AxisBounds()
    assert found.prompt.query_len == AxisBounds(min=8, step=8)
    assert found.prompt.num_ctx_blocks == AxisBounds(min=8, step=8, max=8)


def test_sliced_attention() -> None:
    switch = {"PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "true"}

    assert parse(**switch).sliding == SlidingSpec(threshold=8192, slice_len=1024)
    found = parse(**switch, PT_HPU_SDPA_BC_FACTOR="2048", VLLM_FUSEDSDPA_SLIDE_THLD="4096")
    assert found.sliding == SlidingSpec(threshold=4096, slice_len=2048)


def test_sliced_attention_is_ignored_where_it_is_off_or_unknown() -> None:
    off = parse(PT_HPU_SDPA_BC_FACTOR="2048")
    unknown = parse(V0_10_1, PT_HPU_SDPA_QKV_SLICE_MODE_FWD="true")

    assert (off.sliding, unknown.sliding) == (None, None)
    assert reason(off, "PT_HPU_SDPA_BC_FACTOR") == "PT_HPU_SDPA_QKV_SLICE_MODE_FWD is not on"
    assert "do not depend on it" in reason(unknown, "PT_HPU_SDPA_QKV_SLICE_MODE_FWD")


def test_a_dimension_that_a_phase_has_not_is_ignored() -> None:
    found = parse(VLLM_DECODE_QUERY_BUCKET_MIN="4")

    assert reason(found, "VLLM_DECODE_QUERY_BUCKET_MIN") == "the decode phase has no such dimension"


def test_documented_variables_that_nothing_reads_are_ignored() -> None:
    found = parse(VLLM_HPU_LOG_STEP_GRAPH_COMPILATION="1", VLLM_GRAPH_PROMPT_RATIO="0.3")

    assert [one.name for one in found.ignored] == [
        "VLLM_GRAPH_PROMPT_RATIO",
        "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",
    ]
    assert found.ignored[1].value == "1"
    assert parse(GAUDI_1_22, VLLM_GRAPH_PROMPT_RATIO="0.3").ignored == ()


def test_a_slip_of_a_boolean_is_false_and_noted() -> None:
    found = parse(VLLM_CONTIGUOUS_PA="ture")

    assert not found.contiguous_pa
    assert found.notes[0].startswith("VLLM_CONTIGUOUS_PA is 'ture', which upstream reads as false")


READ = [name for name in BOUNDS if not name.endswith("LIMIT")]
INTEGERS = [*READ, "PT_HPU_SDPA_BC_FACTOR", "VLLM_FUSEDSDPA_SLIDE_THLD", "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE"]


def test_what_python_does_not_read_as_an_integer_is_refused_by_name_whether_it_counts_or_not() -> None:
    names = (*INTEGERS, "VLLM_DEFRAG_THRESHOLD", "VLLM_ROW_PARALLEL_CHUNKS")
    wrong = []
    for strategy, name, text in product(("exp", "lin", "pad"), names, ("abc", "1.5", "", "10**30", "0x10")):
        try:
            wrong.append((strategy, name, text, parse(VLLM_BUCKETING_STRATEGY=strategy, **{name: text})))
        except SpecError as error:
            wrong += [] if error.where == name else [(strategy, name, text, error)]

    assert wrong == []


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (NEWEST, "VLLM_DECODE_BLOCK_BUCKET_LIMIT"),
        (V0_19_1, "VLLM_DECODE_BS_BUCKET_LIMIT"),
        (V0_19_1, "VLLM_DECODE_BS_BUCKET_PAD_MAX"),
        (V0_19_1, "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE"),
        ("vllm-gaudi@v0.16.0", "VLLM_ROW_PARALLEL_CHUNKS"),
    ],
)
def test_variables_that_a_version_never_reads_may_hold_anything(version: str, name: str) -> None:
    assert parse(version, **{name: "abc"}).strategy == "exponential"


@pytest.mark.parametrize(
    ("text", "bound"),
    [("+5", 5), (" 7 ", 7), ("1_000", 1000), ("007", 7), ("\u0663", 3), ("1" + "0" * 30, 2**31 - 1)],
)
def test_numbers_are_read_as_python_reads_them(text: str, bound: int) -> None:
    assert (
        parse(VLLM_BUCKETING_STRATEGY="lin", VLLM_PROMPT_CTX_BUCKET_STEP=text).prompt.num_ctx_blocks.step
        == bound
    )
    assert parse(VLLM_DECODE_BS_BUCKET_MIN=text).decode.batch_size == AxisBounds()


@pytest.mark.parametrize(
    ("strategy", "name", "text", "bounds"),
    [
        ("exp", "VLLM_PROMPT_CTX_BUCKET_MAX", "-5", AxisBounds(max=0)),
        ("lin", "VLLM_PROMPT_CTX_BUCKET_STEP", "-5", AxisBounds(step=2**31 - 1)),
        ("pad", "VLLM_PROMPT_CTX_BUCKET_PAD_MAX", "-5", AxisBounds(pad_max=1)),
    ],
)
def test_a_negative_number_that_the_plugin_takes_has_the_same_effect(
    strategy: str, name: str, text: str, bounds: AxisBounds
) -> None:
    assert parse(VLLM_BUCKETING_STRATEGY=strategy, **{name: text}).prompt.num_ctx_blocks == bounds


@pytest.mark.parametrize(
    ("strategy", "name", "text"),
    [
        ("lin", "DECODE_BS_BUCKET_STEP", "0"),
        ("lin", "DECODE_BS_BUCKET_STEP", "-1"),
        ("lin", "PROMPT_QUERY_BUCKET_MIN", "-1"),
        ("lin", "PROMPT_CTX_BUCKET_MAX", "-1"),
        ("pad", "PROMPT_CTX_BUCKET_STEP", "-1"),
        ("pad", "DECODE_BS_BUCKET_PAD_PERCENT", "51"),
        ("pad", "DECODE_BS_BUCKET_PAD_PERCENT", "-1"),
    ],
)
def test_numbers_without_a_table_are_refused_where_they_count(strategy: str, name: str, text: str) -> None:
    variable = f"VLLM_{name}"

    assert parse(**{variable: text}).strategy == "exponential"
    with pytest.raises(SpecError, match=f"^{variable}: is {text}: the plugin has no table"):
        parse(VLLM_BUCKETING_STRATEGY=strategy, **{variable: text})


@given(
    st.sampled_from(VERSIONS),
    st.dictionaries(
        st.sampled_from([*BOUNDS, *OTHERS]),
        st.sampled_from(["1", "2", "7", "true", "false", ""]),
        max_size=20,
    ),
)
def test_every_variable_is_heeded_or_ignored_with_a_reason_and_never_both(
    version: str, values: dict[str, str]
) -> None:
    try:
        found = BucketingEnvironment.parse(values, version)
    except SpecError:
        return

    ignored = {one.name for one in found.ignored}
    assert ignored.isdisjoint(found.read)
    assert all(one.reason and one.value == values[one.name] for one in found.ignored)
    assert {name for name in values if "_BUCKET_" in name} <= ignored | found.read


@given(
    st.sampled_from(VERSIONS),
    st.dictionaries(
        st.sampled_from([*BOUNDS, *OTHERS]), st.sampled_from(["1", "2", "true", "false"]), max_size=20
    ),
)
def test_taking_the_ignored_variables_away_changes_nothing_else(version: str, values: dict[str, str]) -> None:
    try:
        found = BucketingEnvironment.parse(values, version)
    except SpecError:
        return
    ignored = {one.name for one in found.ignored}
    rest = BucketingEnvironment.parse({n: v for n, v in values.items() if n not in ignored}, version)

    assert rest.ignored == ()
    for name in set(BucketingEnvironment.__slots__) - {"ignored", "notes"}:
        assert getattr(rest, name) == getattr(found, name)


@given(st.text(min_size=1).filter(lambda name: not name.startswith(("VLLM_", "PT_HPU"))), st.text())
def test_other_variables_are_not_looked_at(name: str, value: str) -> None:
    assert BucketingEnvironment.parse({name: value}, NEWEST) == parse()
