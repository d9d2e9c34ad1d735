from __future__ import annotations

from itertools import product
from operator import attrgetter
from typing import Any, get_args

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


V0_11_2, V0_13, V0_14_1, V0_16 = (f"vllm-gaudi@v0.{minor}" for minor in ("11.2", "13.0", "14.1", "16.0"))
OLD = [AD55828, GAUDI_1_21, "vllm-hpu-extension@2b4ba56"]
SLICES = {"PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "true"}
LIN, PAD = {"VLLM_BUCKETING_STRATEGY": "lin"}, {"VLLM_BUCKETING_STRATEGY": "pad"}
FLAG = "VLLM_EXPONENTIAL_BUCKETING"
FILE = {"VLLM_BUCKETING_FROM_FILE": "b.txt"}
UNIFY = {"VLLM_UNIFIED_ATTN": "true"}
CONTIGUOUS = {"VLLM_CONTIGUOUS_PA": "1"}
QUERY_ONE = {"VLLM_PROMPT_QUERY_BUCKET_MIN": "1"}
CONTEXT_NINE = {"VLLM_PROMPT_CTX_BUCKET_MAX": "9"}
PREFILL_FOUR = {"VLLM_PROMPT_BS_BUCKET_MAX": "4"}

Row = tuple[str, "bool | None", dict[str, str], str, Any]
"""A version, the command's prefix caching, an environment, and an attribute with its value."""

FOUND: list[Row] = [
    # The default is exponential from 8211e0b on, and linear before.
    *((version, None, {}, "strategy", "linear" if version in OLD else "exponential") for version in VERSIONS),
    *((version, None, {FLAG: "true"}, "strategy", "exponential") for version in OLD),
    (AD55828, None, {FLAG: "1"}, "strategy", "exponential"),
    (GAUDI_1_21, None, {FLAG: "1"}, "strategy", "linear"),  # Only the word true counts.
    # A strategy by name; the older flag comes before it, a bucket file before both.
    *((version, None, {"VLLM_BUCKETING_STRATEGY": "exp"}, "strategy", "exponential") for version in NAMED),
    *((version, None, LIN, "strategy", "linear") for version in NAMED),
    *((version, None, PAD, "strategy", "padding_aware") for version in NAMED),
    (NEWEST, None, {**PAD, FLAG: "true"}, "strategy", "exponential"),
    (NEWEST, None, {**PAD, FLAG: "0"}, "strategy", "linear"),
    (NEWEST, None, {**PAD, FLAG: ""}, "strategy", "linear"),
    (NEWEST, None, {**FILE, FLAG: "true"}, "strategy", "file"),
    (NEWEST, None, {**FILE, FLAG: "true"}, "file", "b.txt"),
    (NEWEST, None, {"VLLM_BUCKETING_FROM_FILE": ""}, "strategy", "exponential"),
    *((version, None, FILE, "file", None) for version in (V0_10_1, GAUDI_1_22, AD55828)),
    # Unified attention turns contiguous PA and merged prefill on, unless they are set.
    *((version, None, {**UNIFY, **FILE}, "strategy", "unified") for version in UNIFIED),
    *((version, None, UNIFY, "contiguous_pa", True) for version in UNIFIED),
    *((version, None, UNIFY, "merged_prefill", True) for version in UNIFIED),
    *((version, None, UNIFY, "prefix_caching", True) for version in UNIFIED),
    *((version, None, UNIFY, "unified", version in UNIFIED) for version in VERSIONS),
    (V0_17_1, None, {**UNIFY, "VLLM_CONTIGUOUS_PA": "false"}, "contiguous_pa", False),
    (V0_17_1, None, {**UNIFY, "VLLM_MERGED_PREFILL": "no"}, "merged_prefill", False),
    # Unset, contiguous PA is off whatever the command says; it turns prefix caching off.
    *((NEWEST, caching, {}, "contiguous_pa", False) for caching in (None, True, False)),
    *((NEWEST, caching, {}, "prefix_caching", caching is not False) for caching in (None, True, False)),
    (NEWEST, True, CONTIGUOUS, "contiguous_pa", True),
    (NEWEST, True, CONTIGUOUS, "prefix_caching", False),
    (NEWEST, None, {"VLLM_PREFIX_CACHING": "false"}, "contiguous_pa", True),
    (NEWEST, None, {"VLLM_PREFIX_CACHING": "false", "VLLM_CONTIGUOUS_PA": "false"}, "contiguous_pa", False),
    # In the extension it is on without prefix caching, and both may be on.
    *((GAUDI_1_22, caching, {}, "contiguous_pa", not caching) for caching in (None, True, False)),
    *((GAUDI_1_22, caching, {}, "prefix_caching", bool(caching)) for caching in (None, True, False)),
    (GAUDI_1_22, True, {"VLLM_CONTIGUOUS_PA": "true"}, "contiguous_pa", True),
    (GAUDI_1_22, True, {"VLLM_CONTIGUOUS_PA": "true"}, "prefix_caching", True),
    (V0_10_1, None, {}, "contiguous_pa", False),
    (V0_10_1, None, {}, "prefix_caching", True),
    (GAUDI_1_21, True, {}, "contiguous_pa", True),
    (GAUDI_1_21, None, CONTIGUOUS, "contiguous_pa", False),
    # The batch bucket is the prefill batch from v0.11.2 on, unless merged prefill sets it.
    *((version, None, PREFILL_FOUR, "max_num_prefill_seqs", 4) for version in PLUGINS[:-1]),
    *((version, None, PREFILL_FOUR, "max_num_prefill_seqs", None) for version in (V0_10_1, GAUDI_1_22)),
    (NEWEST, None, {"VLLM_MERGED_PREFILL": "on", **LIN, **PREFILL_FOUR}, "max_num_prefill_seqs", None),
    # The exponential strategy: a query of one counts from v0.13 on, the greatest context from v0.16 on.
    (V0_13, None, QUERY_ONE, "prompt.query_len.min", 1),
    *((version, None, QUERY_ONE, "prompt.query_len.min", None) for version in (V0_11_2, V0_10_1, GAUDI_1_22)),
    (NEWEST, None, {"VLLM_PROMPT_QUERY_BUCKET_MIN": "128"}, "prompt.query_len", AxisBounds()),
    (NEWEST, None, {"VLLM_PROMPT_SEQ_BUCKET_MIN": "1"}, "prompt.query_len", AxisBounds()),
    (NEWEST, None, {**FILE, **QUERY_ONE}, "prompt.query_len", AxisBounds()),
    (V0_16, None, CONTEXT_NINE, "prompt.num_ctx_blocks.max", 9),
    (V0_14_1, None, CONTEXT_NINE, "prompt.num_ctx_blocks.max", None),
    # Attention in slices.
    (NEWEST, None, SLICES, "sliding", SlidingSpec(threshold=8192, slice_len=1024)),
    (
        NEWEST,
        None,
        {**SLICES, "PT_HPU_SDPA_BC_FACTOR": "2048", "VLLM_FUSEDSDPA_SLIDE_THLD": "4096"},
        "sliding",
        SlidingSpec(threshold=4096, slice_len=2048),
    ),
    (NEWEST, None, {"PT_HPU_SDPA_BC_FACTOR": "2048"}, "sliding", None),
    (V0_10_1, None, SLICES, "sliding", None),
    (GAUDI_1_22, None, {"VLLM_GRAPH_PROMPT_RATIO": "0.3"}, "ignored", ()),
]


def test_what_a_version_makes_of_an_environment() -> None:
    wrong = []
    for version, caching, environment, name, expected in FOUND:
        found = attrgetter(name)(parse(version, caching=caching, **environment))
        if found != expected:
            wrong.append((version, caching, environment, name, found))

    assert wrong == []


IGNORED: list[tuple[str, dict[str, str], str, str]] = [
    (NEWEST, {**PAD, FLAG: "0"}, "VLLM_BUCKETING_STRATEGY", f"{FLAG} is set"),
    *(
        (
            version,
            {"VLLM_BUCKETING_STRATEGY": "linear_bucketing"},
            "VLLM_BUCKETING_STRATEGY",
            f"{version} chooses by {FLAG}",
        )
        for version in (V0_19_1, V0_17_1, V0_11_2)
    ),
    *(
        (version, FILE, "VLLM_BUCKETING_FROM_FILE", f"{version} reads no bucket file")
        for version in (V0_10_1, AD55828)
    ),
    *(
        (version, {**UNIFY, **FILE}, "VLLM_BUCKETING_FROM_FILE", "unified attention has its")
        for version in UNIFIED
    ),
    *(
        (version, UNIFY, "VLLM_UNIFIED_ATTN", f"{version} has no unified attention")
        for version in VERSIONS
        if version not in UNIFIED
    ),
    (
        NEWEST,
        {"VLLM_HPU_LOG_STEP_GRAPH_COMPILATION": "1"},
        "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",
        "only vllm-fork's V0 engine reads it",
    ),
    (V0_10_1, PREFILL_FOUR, "VLLM_PROMPT_BS_BUCKET_MAX", "the exponential strategy does not read it"),
    (
        NEWEST,
        {"VLLM_MERGED_PREFILL": "on", **LIN, **PREFILL_FOUR},
        "VLLM_PROMPT_BS_BUCKET_MAX",
        "merged prefill sets it",
    ),
    (
        NEWEST,
        {"VLLM_PROMPT_QUERY_BUCKET_MIN": "128"},
        "VLLM_PROMPT_QUERY_BUCKET_MIN",
        "of the exponential strategy only",
    ),
    (
        NEWEST,
        {"VLLM_PROMPT_SEQ_BUCKET_MIN": "1"},
        "VLLM_PROMPT_SEQ_BUCKET_MIN",
        "the exponential strategy reads VLLM_PROMPT_QUERY",
    ),
    (
        GAUDI_1_22,
        {"VLLM_DECODE_BS_BUCKET_LIMIT": "7"},
        "VLLM_DECODE_BS_BUCKET_LIMIT",
        f"{GAUDI_1_22} no longer reads limits",
    ),
    (
        NEWEST,
        {"PT_HPU_SDPA_BC_FACTOR": "2048"},
        "PT_HPU_SDPA_BC_FACTOR",
        "PT_HPU_SDPA_QKV_SLICE_MODE_FWD is not on",
    ),
    (V0_10_1, SLICES, "PT_HPU_SDPA_QKV_SLICE_MODE_FWD", f"the buckets of {V0_10_1} do not depend on it"),
    (
        NEWEST,
        {"VLLM_DECODE_QUERY_BUCKET_MIN": "4"},
        "VLLM_DECODE_QUERY_BUCKET_MIN",
        "the decode phase has no such dimension",
    ),
    (
        NEWEST,
        {"VLLM_GRAPH_PROMPT_RATIO": "0.3"},
        "VLLM_GRAPH_PROMPT_RATIO",
        "only vllm-fork's V0 engine reads it",
    ),
]


def test_why_a_variable_is_ignored() -> None:
    wrong = []
    for version, environment, name, why in IGNORED:
        found = reason(parse(version, **environment), name)
        if not found.startswith(why):
            wrong.append((version, environment, name, found))

    assert wrong == []


def test_a_bucket_file_leaves_nothing_else_to_be_read() -> None:
    found = parse(**FILE, **QUERY_ONE, VLLM_EXPONENTIAL_BUCKETING="true")

    assert [one.name for one in found.ignored] == [FLAG, "VLLM_PROMPT_QUERY_BUCKET_MIN"]


def test_a_slip_of_a_boolean_is_false_and_noted() -> None:
    assert parse(GAUDI_1_21, VLLM_EXPONENTIAL_BUCKETING="1").notes == (
        f"{FLAG} is '1', which upstream reads as false (true is: true)",
    )
    found = parse(VLLM_CONTIGUOUS_PA="ture")
    assert not found.contiguous_pa
    assert found.notes[0].startswith("VLLM_CONTIGUOUS_PA is 'ture', which upstream reads as false")


@pytest.mark.parametrize("name", ["exponential", "EXP", "", "pad ", "exponential_bucketing"])
@pytest.mark.parametrize("beside", ["VLLM_BUCKETING_FROM_FILE", "VLLM_EXPONENTIAL_BUCKETING", "X"])
def test_another_name_is_refused_as_the_plugin_refuses_it(name: str, beside: str) -> None:
    with pytest.raises(SpecError, match=r"VLLM_BUCKETING_STRATEGY: is .* \(one of exp, lin, pad\)"):
        parse(VLLM_BUCKETING_STRATEGY=name, **{beside: "1"})


@pytest.mark.parametrize("version", [V0_19_1, V0_17_1, V0_11_2])
def test_before_v0_21_the_plugin_does_not_start_with_a_newer_name(version: str) -> None:
    with pytest.raises(SpecError, match="is 'lin': the plugin does not start"):
        parse(version, VLLM_BUCKETING_STRATEGY="lin")


def test_a_prefill_batch_of_none_is_refused() -> None:
    with pytest.raises(SpecError, match="VLLM_PROMPT_BS_BUCKET_MAX: is 0"):
        parse(VLLM_PROMPT_BS_BUCKET_MAX="0")


def test_exponential_heeds_two_bounds_and_ignores_the_rest() -> None:
    values = dict.fromkeys(BOUNDS, "1")
    found = parse(**values)

    assert found.prompt.query_len == AxisBounds(min=1)
    assert found.prompt.num_ctx_blocks == AxisBounds(max=1)
    assert (found.prompt.batch_size, found.decode.batch_size, found.decode.num_blocks) == (AxisBounds(),) * 3
    heeded = {"VLLM_PROMPT_QUERY_BUCKET_MIN", "VLLM_PROMPT_CTX_BUCKET_MAX", "VLLM_PROMPT_BS_BUCKET_MAX"}
    assert {one.name for one in found.ignored} == set(BOUNDS) - heeded


def test_limits_count_in_the_exponential_strategy_up_to_ad55828() -> None:
    values = {f"VLLM_{axis}_BUCKET_LIMIT": "7" for axis in AXES}
    found = parse(AD55828, VLLM_EXPONENTIAL_BUCKETING="true", **values)

    assert found.prompt.batch_size == found.prompt.query_len == AxisBounds(limit=7)
    assert found.decode.batch_size == found.decode.num_blocks == AxisBounds(limit=7)
    assert {one.name for one in found.ignored} == {
        "VLLM_PROMPT_QUERY_BUCKET_LIMIT",
        "VLLM_PROMPT_CTX_BUCKET_LIMIT",
    }


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
