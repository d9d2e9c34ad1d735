"""Bucket files: what a line means, and that no line crashes, computes or grows without bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aotgaudi.bucketing.bucket_file import (
    EVALUATED,
    LITERAL,
    Dialect,
    FileStrategy,
    SkippedLine,
    bucket_lines,
    cut_bucket_file,
    read_bucket_file,
)
from aotgaudi.bucketing.combine import ProductRules
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.errors import SpecError

DIALECTS = pytest.mark.parametrize("dialect", [LITERAL, EVALUATED], ids=["literal", "evaluated"])


def inputs_with(text: str | None, **changes: int) -> BucketingInputs:
    numbers = {
        "max_num_seqs": 8,
        "max_num_prefill_seqs": 1,
        "block_size": 128,
        "max_num_batched_tokens": 4096,
        "max_model_len": 4096,
        "num_blocks": 300,
    }
    return BucketingInputs(**{**numbers, **changes}, file_text=text)


@DIALECTS
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(1, 128, 0)", [(1, 128, 0)]),
        ("1, 128, 0  # a comment", [(1, 128, 0)]),
        ("([1, 2], 128, [0, 4])", [(1, 128, 0), (1, 128, 4), (2, 128, 0), (2, 128, 4)]),
        ("(1, range(128, 385, 128), 0)", [(1, 128, 0), (1, 256, 0), (1, 384, 0)]),
        ("(1, 128, range(4, 0, -2))", [(1, 128, 4), (1, 128, 2)]),
        ("(1, 128, range(2, 4))", [(1, 128, 2), (1, 128, 3)]),
        ("(1.9, '128', True)", [(1, 128, 1)]),
        ("(1, [], 0)", []),
        ("([], [[1]], 0)", []),
        ("(+1, 128, 0)", [(1, 128, 0)]),
    ],
)
def test_a_line_means_all_products_of_its_items(
    line: str, expected: list[tuple[int, int, int]], dialect: Dialect
) -> None:
    assert read_bucket_file(line, dialect).prompt == tuple(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(1, 128 * 2, 0)", [(1, 256, 0)]),
        ("(1, 2**8 + (1 << 4) - 10 // 3, 7 % 4)", [(1, 269, 3)]),
        ("(1, 256 / 2, 0)", [(1, 128, 0)]),
        ("(1, 128, range(2))", [(1, 128, 0), (1, 128, 1)]),
        ("(1, [-(-128)], 0)", [(1, 128, 0)]),
    ],
)
def test_numbers_may_be_computed_up_to_v0_16_only(line: str, expected: list[tuple[int, int, int]]) -> None:
    assert read_bucket_file(line, EVALUATED).prompt == tuple(expected)
    with pytest.raises(SpecError, match=r"bucketing\.file, line 1: "):
        read_bucket_file(line, LITERAL)


def test_a_query_length_of_one_makes_a_decode_bucket() -> None:
    found = read_bucket_file("# both\r\n\r\n([1, 2], [1, 128], 4)\r(4, 1, 8)", LITERAL)

    assert found.prompt == ((1, 128, 4), (2, 128, 4))
    assert found.decode == ((1, 1, 4), (2, 1, 4), (4, 1, 8))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1, 128, 0]", "is no tuple"),
        ("(1, 128)", "is not three items in parentheses"),
        ("(1, 128, 0); (1, 256, 0)", "is not Python: invalid syntax"),
        ("(1, 128, x)", "uses the name 'x'"),
        ("__import__('os').system('true')", "uses the name '__import__'"),
        ("(1, 128, range(0, 10, 0))", "has a range with step 0"),
        ("\ufeff(1, 128, 0)", "is not Python: invalid non-printable character"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_or_left_out_by_version(line: str, problem: str) -> None:
    text = f"(1, 128, 0)\n{line}\n"

    found = read_bucket_file(text, EVALUATED)

    assert found.prompt == ((1, 128, 0),)
    assert [skipped.number for skipped in found.skipped] == [2]
    assert found.skipped[0].problem.startswith(problem)
    with pytest.raises(SpecError, match=r"bucketing\.file, line 2: ") as refusal:
        read_bucket_file(text, LITERAL)
    assert problem in refusal.value.problem
    assert "batch sizes, query lengths, context blocks" in refusal.value.remedy


@DIALECTS
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("(-1, 128, 0)", "has the number -1"),
        ("(1, 128, 2147483648)", "has the number 2147483648"),
        ("(1, (128, 256), 0)", "has a tuple where a number should be"),
        ("(1, [128, [256]], 4)", "has a list where a number should be"),
        ("(1, 128, None)", "has a NoneType where a number should be"),
        ("(1, 128, 'many')", "has 'many' where a number should be"),
        ("(1, 128, 1e999)", "has inf where a number should be"),
        (f"(1, 128, 0x{'f' * 1000})", "has a number of more than 64 bits"),
        ("(1, 128, range(0, 1000000000000))", "has a range of 1,000,000,000,000 values"),
        ("(range(9000), range(9000), range(9000))".replace("(9", "(0, 9"), "gives 729,000,000,000 buckets"),
        ("(1, [x for x in range(3)], 0)", "is made of more than numbers, lists and ranges (ListComp)"),
        ("(1, 128, {1, 2})", "is made of more than numbers, lists and ranges (Set)"),
        ("(" + "-" * 9000 + "1, 128, 0)", "is nested too deeply"),
        ("(1, 128, 0)" + " " * 20000 + "#", "has 20,012 characters"),
    ],
)
def test_what_the_public_code_would_choke_on_is_refused(line: str, problem: str, dialect: Dialect) -> None:
    with pytest.raises(SpecError, match=r"bucketing\.file, line 1: ") as refusal:
        read_bucket_file(line, dialect)

    assert refusal.value.problem.startswith(problem)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("(9**9**9, 128, 0)", "has a number with exponent 387420489"),
        ("(1 << 10**9, 128, 0)", "has a number with exponent 1000000000"),
        ("(2**64 * 2, 128, 0)", "has a number of more than 64 bits"),
        ("([1] * 10**9, 128, 0)", "is made of more than numbers, lists and ranges (BinOp)"),
        ("(" + "1+" * 5000 + "1, 128, 0)", "is nested too deeply"),
        ("(not 1, 128, 0)", "is made of more than numbers, lists and ranges (UnaryOp)"),
        ("(1 | 2, 128, 0)", "is made of more than numbers, lists and ranges (BinOp)"),
    ],
)
def test_no_number_is_computed_without_bound(line: str, problem: str) -> None:
    with pytest.raises(SpecError, match="line 1") as refusal:
        read_bucket_file(line, EVALUATED)

    assert refusal.value.problem.startswith(problem)


@pytest.mark.parametrize(
    "line", ["(1 // 0, 128, 0)", "(1, 128, range())", "(1 << -1, 128, 0)", "(1, 128, range(1.5))"]
)
def test_a_number_that_cannot_be_computed_leaves_its_line_out(line: str) -> None:
    found = read_bucket_file(line, EVALUATED)

    assert (found.prompt, len(found.skipped)) == ((), 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("#" * (4 * 2**20 + 1), "has 4,194,305 characters"), ("x\r" * 100_001, "has 100,001 lines")],
)
def test_a_file_that_is_too_large_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        read_bucket_file(text, EVALUATED)


def test_many_lines_may_list_a_million_buckets_at_most() -> None:
    text = "(range(0, 1000), range(2, 602), 0)\n" * 2

    with pytest.raises(
        SpecError, match=r"line 2: gives 600,000 buckets, with which there are more than 1,000,000"
    ):
        read_bucket_file(text, LITERAL)


items = st.one_of(
    st.integers(0, 5000),
    st.lists(st.integers(0, 5000), max_size=4),
    st.builds(range, st.integers(0, 9), st.integers(0, 9)),
)


@given(st.tuples(items, items, items))
def test_every_dialect_reads_what_a_person_writes(line: tuple[object, object, object]) -> None:
    axes = [[item] if isinstance(item, int) else list(item) for item in line]  # type: ignore[call-overload]

    for dialect in (LITERAL, EVALUATED):
        found = read_bucket_file(repr(line), dialect)
        assert sorted(found.prompt + found.decode) == sorted(itertools.product(*axes))
        assert {query_len for _, query_len, _ in found.decode} <= {1}
        assert found.skipped == ()


@given(st.text() | st.text("(),[]range0123456789 -+*/<.#'\"\n\\xe{}:"))
@example("(1, 128, '\\x00')")
@example("(1, 1, 1)\x0b(")
def test_no_text_is_more_than_read_or_refused(text: str) -> None:
    for dialect in (LITERAL, EVALUATED):
        where, numbers = read_or_refused(text, dialect)
        assert where.startswith("bucketing.file")
        assert all(number >= 0 for number in numbers)


def read_or_refused(text: str, dialect: Dialect) -> tuple[str, list[int]]:
    try:
        found = read_bucket_file(text, dialect)
    except SpecError as error:
        return error.where, []
    return "bucketing.file", [number for bucket in found.prompt + found.decode for number in bucket]


def test_a_table_is_filtered_corrected_and_ascends() -> None:
    text = "(2, 1, [4, 999])\n(8, 1, 4)\n(1, 8192, 0)\n([2, 1], 128, 0)\n"
    strategy = find_strategy("vllm-gaudi@091bbad", "file")

    assert strategy.prompt_table(inputs_with(text)) == ((1, 128, 0), (2, 128, 0))
    # 2 sequences of 4096 tokens have 64 blocks; 8 sequences need 8.
    assert strategy.decode_table(inputs_with(text)) == ((2, 1, 4), (2, 1, 64))


def test_speculation_adds_to_a_listed_table() -> None:
    strategy = find_strategy("vllm-gaudi@091bbad", "file")
    inputs = inputs_with("(1, 1, 8)", num_speculative_tokens=1)

    assert strategy.decode_seed_table(inputs) == ((1, 1, 8),)
    assert strategy.decode_table(inputs) == ((1, 1, 8), (2, 1, 8), (2, 1, 16))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"bucketing\.file: is missing"),
        ("(1, 1, 4)", "lists no prompt bucket .a line with a query length other than 1"),
        ("(1, 9999, 4)", "limits: leave no prompt bucket"),
    ],
)
def test_a_phase_without_buckets_is_an_error(text: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FileStrategy(LITERAL, ProductRules()).prompt_table(inputs_with(text))


def test_the_lines_that_are_left_out_are_told() -> None:
    strategy = find_strategy("vllm-gaudi@v0.16.0", "file")
    assert isinstance(strategy, FileStrategy)

    found = strategy.listed(inputs_with("(1, 128, 0)\n(1, 128)\n"))

    assert found.skipped == (SkippedLine(2, "is not three items in parentheses"),)


buckets = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 40))


def read(lines: list[str], dialect: Dialect) -> list[Bucket]:
    found = read_bucket_file("\n".join(lines), dialect)
    assert not found.skipped
    return [*found.prompt, *found.decode]


@pytest.mark.parametrize("dialect", [LITERAL, EVALUATED])
@given(table=st.sets(buckets))
def test_what_is_written_is_read_back_once_each(table: set[Bucket], dialect: Dialect) -> None:
    found = read(list(bucket_lines(table)), dialect)

    assert len(found) == len(table)
    assert set(found) == table


@given(st.lists(buckets, max_size=12))
def test_order_and_repetition_change_nothing(table: list[Bucket]) -> None:
    assert list(bucket_lines(table)) == list(bucket_lines([*reversed(table), *table]))


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ([], []),
        ([(1, 128, 0)], ["(1, 128, 0)"]),
        ([(1, 128, 0), (1, 128, 1), (1, 128, 2)], ["(1, 128, [0, 1, 2])"]),
        ([(1, 128, context) for context in range(4)], ["(1, 128, range(0, 4))"]),
        ([(1, 128, context) for context in (2, 5, 8, 11)], ["(1, 128, range(2, 12, 3))"]),
        ([(1, query, 0) for query in (128, 256)], ["(1, [128, 256], 0)"]),
        ([(1, 128, 0), (1, 256, 1), (2, 256, 1)], ["(1, 128, 0)", "(1, 256, 1)", "(2, 256, 1)"]),
    ],
)
def test_equal_pieces_share_a_line(table: list[Bucket], lines: list[str]) -> None:
    assert list(bucket_lines(table)) == lines


@pytest.mark.parametrize("dialect", [LITERAL, EVALUATED])
def test_lists_and_ranges_stay_as_short_as_readers_take_them(dialect: Dialect) -> None:
    progression = [(1, 128, context) for context in range(10_001)]
    irregular = [(2, 128, context * context) for context in range(2_500)]

    found = read(list(bucket_lines([*progression, *irregular])), dialect)

    assert sorted(found) == [*progression, *irregular]


ROWS = st.sets(
    st.tuples(st.integers(1, 9), st.sampled_from([1, 1, 2, 64, 128]), st.integers(0, 40)), max_size=40
)


@given(ROWS, st.sets(st.integers(1, 64), min_size=1), st.integers(1, 12))
def test_slices_hold_all_buckets_about_as_many_each_and_both_phases(
    rows: set[Bucket], decodes: set[int], num: int
) -> None:
    wanted = rows | {(size, 1, size) for size in decodes} | {(1, 128, 0)}
    text = "".join(f"{line}\n" for line in ("# of these limits", *bucket_lines(wanted)))
    if num > len(wanted):
        with pytest.raises(SpecError, match=f"there are {len(wanted)} buckets"):
            cut_bucket_file(text, num)
        return

    files = cut_bucket_file(text, num)

    listed = [read_bucket_file(file, LITERAL) for file in files]
    assert all(file.startswith("# of these limits\n") for file in files)
    assert all(one.prompt and one.decode for one in listed)
    assert {row for one in listed for row in (*one.prompt, *one.decode)} == wanted
    sizes = [len(one.prompt) + len(one.decode) for one in listed]
    assert max(sizes) <= -(-len(wanted) // num) + 1
    assert files == cut_bucket_file(text, num)
