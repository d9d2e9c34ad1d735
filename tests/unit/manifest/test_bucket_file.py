from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import UpstreamLookup
from aotgaudi.bucketing.versions import (
    HISTORY,
    GaudiVersion,
    find_strategy,
    find_version,
    open_upstream_lookup,
)
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.coverage import coverage_of, coverage_of_server
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from tests.specs import spec_tables
from tests.unit.bucketing.walks import all_prompts

GAUDI = tuple(version.name for version in HISTORY if isinstance(version, GaudiVersion))
NEWER = GAUDI[: GAUDI.index("vllm-gaudi@v0.19.1") + 1]
"""They keep prompts that are longer than the model, padded, and so have a table for chunks that start anywhere."""
OLDER = GAUDI[len(NEWER) :]
WHOLE_PROMPTS = {"engine": "vllm", "chunked_prefill": False}
CHUNKS = {"engine": "vllm"}


def spec_of(
    limits: dict[str, int] | None = None, scheduler: dict[str, Any] | None = None, **bucketing: Any
) -> BuildSpec:
    return spec_from_json(
        spec_tables(
            config={"max_position_embeddings": 2**20},
            limits=limits,
            scheduler=scheduler or CHUNKS,
            bucketing=bucketing,
        )
    )


@st.composite
def specs(
    draw: st.DrawFn, versions: tuple[str, ...] = GAUDI, *, drafted: int = 2, is_plain: bool = False
) -> BuildSpec:
    """`is_plain`: whole prompts, blocks of several tokens, neither contiguous nor sliced attention."""
    block_size = draw(st.integers(2 if is_plain else 1, 5))
    max_model_len = draw(st.integers(2, 30))
    scheduler = WHOLE_PROMPTS if is_plain else draw(st.sampled_from([CHUNKS, WHOLE_PROMPTS]))
    shortest = max_model_len if scheduler is WHOLE_PROMPTS else 1
    tokens = draw(st.integers(max(block_size, shortest), 36))
    limits = {
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": tokens,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": draw(st.integers(-(-max_model_len // block_size), 40)),
    }
    version = draw(st.sampled_from(versions))
    strategies = [name for name in find_version(version).strategies if name != "file"]
    sliding = st.builds(dict, threshold=st.integers(4, 16), slice_len=st.integers(2, 8))
    return spec_of(
        limits,
        scheduler,
        version=version,
        strategy=draw(st.sampled_from(strategies)),
        contiguous_pa=not is_plain and draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        num_speculative_tokens=draw(st.integers(0, drafted)),
        max_padding=draw(st.sampled_from([1.0, 1.5, 2.0, 8.0])),
        prompt={"query_len": {"min": draw(st.sampled_from([None, 1]))}},
        sliding=None if is_plain else draw(st.none() | sliding),
    )


def read_back(found: BucketFile) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """What upstream's rules make of the text."""
    inputs = BucketingInputs.from_spec(found.spec.limits, found.spec.bucketing)
    strategy = find_strategy(found.spec.bucketing.version, "file")
    return strategy.prompt_table(inputs), strategy.decode_seed_table(inputs)


def warmed_prompts(found: BucketFile, lookup: UpstreamLookup) -> set[Bucket]:
    """What a dummy for each bucket is looked up to: cut to the model's length, where that version cuts."""
    limits, compiled = found.spec.limits, set()
    for size, query, blocks in reversed(found.prompt):
        is_too_long = query + blocks * limits.block_size > limits.max_model_len
        left = max(0, (limits.max_model_len - query) // limits.block_size)
        compiled.add(lookup.find_prompt(size, query, left if is_too_long else blocks).bucket)
    return compiled


def prompt_steps(spec: BuildSpec) -> Iterator[tuple[int, int]]:
    block_size = spec.limits.block_size
    for query, context in all_prompts(spec.limits, spec.bucketing, spec.scheduler):
        yield query, -(-context // block_size)


def decode_steps(spec: BuildSpec) -> Iterator[tuple[int, int]]:
    limits = spec.limits
    for size in range(1, min(limits.max_num_seqs, limits.num_blocks) + 1):
        most = limits.num_blocks
        if not spec.bucketing.contiguous_pa:
            most = min(most, size * limits.max_blocks_per_seq)
        for blocks in range(size, most + 1):
            yield size, blocks


def accepted(spec: BuildSpec) -> BucketFile | None:
    with contextlib.suppress(CoverageError, SpecError):  # SpecError: no public table for such limits.
        return bucket_file_of(spec)
    return None


def a_file_of(spec: BuildSpec) -> BucketFile:
    """The file, of a spec that has one: hypothesis draws another spec where it has none."""
    found = accepted(spec)
    assume(found is not None)
    assert found is not None
    return found


@settings(max_examples=300, deadline=None)
@given(specs())
def test_upstream_reads_back_what_is_listed_and_looks_every_step_up_to_a_warm_bucket(spec: BuildSpec) -> None:
    found = a_file_of(spec)
    server = found.spec
    inputs = BucketingInputs.from_spec(server.limits, server.bucketing)
    lookup = open_upstream_lookup(server.bucketing.version, "file", inputs)

    assert read_back(found) == (found.prompt, found.decode)
    warm = warmed_prompts(found, lookup)
    for query, blocks in set(prompt_steps(server)):
        answer = lookup.find_prompt(1, query, blocks)
        assert (answer.is_added, answer.bucket in warm) == (False, True), (query, blocks)
    for size, blocks in decode_steps(server):
        padded = lookup.find_decode(size, blocks)
        again = lookup.find_decode(padded.bucket[0], blocks)
        assert (padded.is_added, again.is_added) == (False, False), (size, blocks)
        assert again.bucket[0] == padded.bucket[0]
        assert again.bucket[2] >= blocks


@settings(max_examples=100, deadline=None)
@given(specs())
def test_its_manifest_has_what_the_server_reads_and_nothing_to_add(spec: BuildSpec) -> None:
    found = a_file_of(spec)
    manifest = Manifest.of(found.spec)
    server = coverage_of_server(found.spec)

    assert manifest.of_kind("prompt") == tuple(PromptEntry(*bucket) for bucket in found.prompt)
    decodes = manifest.of_kind("decode")
    assert set(decodes) >= {DecodeEntry(*bucket) for bucket in found.decode}
    assert len(decodes) == len(found.decode) or spec.bucketing.num_speculative_tokens
    assert coverage_of(manifest).is_closed
    assert server is not None
    assert server.coverage.is_closed


@settings(max_examples=100, deadline=None)
@given(specs())
def test_written_anew_from_itself_it_is_the_same_text(spec: BuildSpec) -> None:
    found = a_file_of(spec)

    assert bucket_file_of(found.spec).text == found.text
    assert bucket_file_of(spec).text == found.text


@settings(max_examples=200, deadline=None)
@given(specs(NEWER, drafted=0))
def test_versions_that_keep_padded_prompts_can_always_be_given_a_file(spec: BuildSpec) -> None:
    assume(spec.limits.max_num_batched_tokens > 1)
    with contextlib.suppress(SpecError):  # It has no table of its own for such limits.
        bucket_file_of(spec)


@settings(max_examples=100, deadline=None)
@given(specs(OLDER, drafted=0, is_plain=True))
def test_versions_that_drop_padded_prompts_can_be_given_a_file_for_whole_prompts(spec: BuildSpec) -> None:
    """But where the last token of the model's length may be all that is left to compute: a query of 1 is a decode."""
    limits, bucketing = spec.limits, spec.bucketing
    assume(not bucketing.prefix_caching or limits.max_model_len % limits.block_size != 1)
    with contextlib.suppress(SpecError):
        bucket_file_of(spec)


@settings(max_examples=100, deadline=None)
@given(specs(drafted=0), st.sampled_from(GAUDI))
def test_a_file_for_one_version_is_proved_anew_for_another_or_refused(spec: BuildSpec, other: str) -> None:
    """Nothing is mended here (coverage = "upstream"): what is accepted is the very same rows."""
    found = a_file_of(spec)
    update = {"version": other, "coverage": "upstream"}
    moved = found.spec.model_copy(update={"bucketing": found.spec.bucketing.model_copy(update=update)})

    again = accepted(moved)

    if again is None:
        with pytest.raises((CoverageError, SpecError)):
            bucket_file_of(moved)
    else:
        assert set(again.prompt) <= set(found.prompt)
        assert all(row in found.decode for row in again.decode)


LIMITS = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "max_model_len": 8192,
    "block_size": 128,
    "num_blocks": 4105,
}


def test_the_text_for_8192_tokens() -> None:
    assert bucket_file_of(spec_of(LIMITS)).text == (
        "# buckets for vllm-gaudi@091bbad: (batch sizes, query lengths, context blocks); a query of 1 is a decode\n"
        "# --num-gpu-blocks-override 4105 --block-size 128 --max-model-len 8192 --max-num-batched-tokens 8192"
        " --max-num-seqs 128\n"
        "(1, 128, [0, 64])\n"
        "(1, 256, [0, 62])\n"
        "(1, 384, [0, 63])\n"
        "(1, 512, [0, 60])\n"
        "(1, 768, [0, 58])\n"
        "(1, 896, 61)\n"
        "(1, 1024, [0, 56])\n"
        "(1, 1536, [0, 52])\n"
        "(1, 1920, 57)\n"
        "(1, 2048, [0, 48])\n"
        "(1, 2944, [0, 41])\n"
        "(1, 3968, 49)\n"
        "(1, 4096, [0, 32])\n"
        "(1, 5888, [0, 18])\n"
        "(1, 8192, 33)\n"
        "(1, 1, [1, 64])\n"
        "(2, 1, 128)\n"
        "(4, 1, [128, 256])\n"
        "(8, 1, range(128, 513, 128))\n"
        "(12, 1, range(128, 769, 128))\n"
        "(22, 1, [128, 256, 384, 512, 640, 896, 1280, 1408])\n"
        "(40, 1, [128, 256, 384, 512, 640, 896, 1280, 1664, 2304, 2560])\n"
        "(72, 1, [128, 256, 384, 512, 640, 896, 1280, 1664, 2304, 3200, 4352, 4608])\n"
        "(128, 1, [128, 256, 384, 512, 640, 896, 1280, 1664, 2304, 3200, 4352, 6016, 8192])\n"
    )


def test_closing_entries_as_they_are_would_be_looked_up_to_and_not_be_warm() -> None:
    """Our own closed table has (1, 8192, 0) and (1, 8192, 33); the dummy of the second is looked up to the first."""
    closed = Manifest.of(spec_of(LIMITS))
    text = "".join(
        f"{(entry.batch_size, entry.query_len, entry.num_ctx_blocks)}\n" for entry in closed.of_kind("prompt")
    )
    text += "".join(f"{(entry.batch_size, 1, entry.num_blocks)}\n" for entry in closed.of_kind("decode"))
    as_it_is = spec_of(LIMITS, strategy="file", coverage="upstream", file_text=text)

    with pytest.raises(CoverageError, match=r"its warm-up does not compile the bucket \(1, \d+, \d+\)"):
        bucket_file_of(as_it_is)
    assert find_version(as_it_is.bucketing.version).name == GAUDI[0]


@pytest.mark.parametrize("version", OLDER)
def test_the_smallest_step_that_no_file_covers_is_named(version: str) -> None:
    with pytest.raises(CoverageError) as caught:
        bucket_file_of(spec_of(LIMITS, version=version))

    text = str(caught.value)
    assert text.startswith(
        f"{version}: with any bucket file it has no entry for 64 of 2,144 prompt cells; the smallest: a prompt chunk of"
        " 1 token after 8,065 tokens (64 blocks), 8,066 in all, for which it compiles (1, 1, "
    )
    assert text.endswith(" (a server without chunked prefill, or vllm-gaudi from v0.19.1 on)")


@pytest.mark.parametrize("version", OLDER)
def test_whole_prompts_of_older_versions_are_listed_one_by_one(version: str) -> None:
    found = bucket_file_of(spec_of(LIMITS, WHOLE_PROMPTS, version=version))

    longest = {(1, 8192 - 128 * blocks, blocks) for blocks in range(64)}
    assert longest <= set(found.prompt)


def test_a_table_that_is_to_stay_as_it_is_is_refused_with_its_hole() -> None:
    with pytest.raises(CoverageError) as caught:
        bucket_file_of(spec_of(LIMITS, version="vllm-gaudi@v0.17.1", coverage="upstream"))

    assert "with this table as a bucket file it has no entry for 379 of 2,144 prompt cells" in str(
        caught.value
    )
    assert 'coverage = "closed"' in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": "vllm-gaudi@v0.10.1"},
            "bucketing.version: is 'vllm-gaudi@v0.10.1', which reads no bucket file (vllm-gaudi from v0.11.2 on",
        ),
        ({"version": "vllm-gaudi@v0.17.1", "strategy": "unified"}, "bucketing.strategy: is 'unified'"),
        ({"merged_prefill": True}, "bucketing.merged_prefill: is true"),
    ],
)
def test_servers_that_have_no_use_for_a_file_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        bucket_file_of(spec_of(LIMITS, **changes))

    assert str(caught.value).startswith(message)


def test_a_server_without_graphs_is_refused() -> None:
    spec = spec_of(LIMITS)
    eager = spec.model_copy(update={"target": replace_mode(spec, "eager")})

    with pytest.raises(SpecError, match="there are no graphs"):
        bucket_file_of(eager)


def replace_mode(spec: BuildSpec, mode: str) -> Any:
    return spec.target.model_copy(update={"execution_mode": mode})


def test_of_our_own_scheduler_s_spec_the_server_is_one_with_chunked_prefill() -> None:
    own = spec_of(LIMITS, {"engine": "aotgaudi"})

    assert bucket_file_of(own).text == bucket_file_of(spec_of(LIMITS)).text
    assert bucket_file_of(own).spec.scheduler.engine == "vllm"


def test_what_the_server_must_be_given() -> None:
    found = bucket_file_of(
        spec_of(
            {**LIMITS, "max_num_prefill_seqs": 4},
            WHOLE_PROMPTS,
            contiguous_pa=True,
            version="vllm-gaudi@v0.17.1",
            sliding={"threshold": 4096, "slice_len": 512},
        )
    )

    assert found.pinned == {
        "num-gpu-blocks-override": 4105,
        "block-size": 128,
        "max-model-len": 8192,
        "max-num-batched-tokens": 8192,
        "max-num-seqs": 128,
    }
    assert found.switches == {"enable-chunked-prefill": False, "enable-prefix-caching": False}
    assert found.variables("/x/chat.buckets") == {
        "VLLM_BUCKETING_FROM_FILE": "/x/chat.buckets",
        "VLLM_CONTIGUOUS_PA": "true",
        "VLLM_PROMPT_BS_BUCKET_MAX": "4",
        "PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "true",
        "PT_HPU_SDPA_BC_FACTOR": "512",
        "VLLM_FUSEDSDPA_SLIDE_THLD": "4096",
    }
    assert found.unset == (
        "VLLM_ENABLE_BUCKETING",
        "VLLM_MERGED_PREFILL",
        "VLLM_SKIP_WARMUP",
        "VLLM_UNIFIED_ATTN",
    )
