"""What a start says of manifests with holes, and of sampling defaults that the bundle's sampler cannot do."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.bundle.signing import generate_key
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli.options import parse_byte_count
from aotgaudi.entries import DecodeEntry, Entry, MhcEntry, PromptEntry
from aotgaudi.errors import CoverageError
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.llm.assemble import SplitCounter, caches_prefixes, prewarm, sampling_defaults
from aotgaudi.llm.model_files import GenerationConfig
from aotgaudi.llm.running import ModelOptions, SplitCounts
from aotgaudi.llm.start import check_coverage
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import KvCache, with_kv_cache_memory
from aotgaudi.runtime.executables import BoundProgram
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from tests.specs import SMALL_CONFIG, spec_of

WHAT = (
    "no entry for 1 of 17 prompt cells; the smallest: a prompt chunk of 1 token after 113 tokens (8 blocks)"
)


def manifest_of(coverage: str) -> Manifest:
    return Manifest.of(spec_of(bucketing={"coverage": coverage}))


def test_a_manifest_with_holes_is_refused_under_require_warm() -> None:
    with pytest.raises(CoverageError) as caught:
        check_coverage(manifest_of("upstream"), require_warm=True, sealed=spec_of())

    assert caught.value.exit_code == 7
    assert str(caught.value).startswith(f"manifest: {WHAT}")
    assert "aotgaudi coverage MANIFEST" in str(caught.value)


def test_without_require_warm_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_coverage(manifest_of("upstream"), require_warm=False, sealed=spec_of())

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith(WHAT)


def test_a_closed_manifest_passes_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    check_coverage(manifest_of("closed"), require_warm=True, sealed=spec_of())

    assert caplog.messages == []


def test_more_blocks_than_the_entries_read_are_refused_with_the_memory_that_they_are_made_for() -> None:
    limits = {"num_blocks": 9, "max_num_seqs": 8}
    sealed = Manifest.of(spec_of(config=SMALL_CONFIG, limits=limits))
    few, many = (
        replace(sealed, spec=with_kv_cache_memory(sealed.spec, KvCache.of(sealed.spec).num_bytes(num_blocks)))
        for num_blocks in (8, 40)
    )

    check_coverage(few, require_warm=True, sealed=sealed.spec)
    with pytest.raises(
        CoverageError, match=r"with 40 KV blocks no entry for .* limits\.num_blocks 9"
    ) as told:
        check_coverage(many, require_warm=False, sealed=sealed.spec)

    size = parse_byte_count(str(told.value).rsplit(" ", 1)[1].rstrip(")"))
    assert with_kv_cache_memory(sealed.spec, size).limits == sealed.spec.limits


@pytest.mark.parametrize(
    ("in_spec", "asked", "expected"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_prefixes_are_cached_as_asked_else_as_the_spec_says(
    in_spec: bool, asked: bool | None, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    assert caches_prefixes(Manifest.of(spec_of(bucketing={"prefix_caching": in_spec})), asked) is expected

    assert [message.startswith("prefix caching is off") for message in caplog.messages] == [True] * (
        not expected
    )


@pytest.mark.parametrize("asked", [None, True])
def test_prefixes_are_not_cached_where_no_prompt_has_a_context(
    asked: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    bucketing = {"strategy": "file", "file_text": "(1, 32, 0)\n(2, 1, 24)\n", "coverage": "upstream"}

    assert not caches_prefixes(Manifest.of(spec_of(bucketing=bucketing)), asked)

    assert caplog.messages == ["prefix caching is off: no prompt entry of the manifest has a context"]


def test_sampling_defaults_that_the_sampler_cannot_do_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stated = {"temperature": 0.6, "repetition_penalty": 1.1, "min_p": 0.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated), encoding="utf-8")
    sampler = SamplerSpec(settings=(SamplerSetting(temperature=1, top_p=0.9, top_k=10),))
    caplog.set_level(logging.INFO)

    assert sampling_defaults(GenerationConfig(), ModelDirectory(tmp_path), sampler) == {"temperature": 0.6}

    (said, warned) = caplog.records
    assert said.getMessage() == "sampling defaults of the model: temperature = 0.6"
    assert warned.levelno == logging.WARNING
    assert warned.getMessage().endswith(": min_p = 0.05, repetition_penalty = 1.1")


@pytest.mark.parametrize("require_warm", [True, False])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_bundle_is_hashed_where_it_must_be_warm_or_signed(
    tmp_path: Path, require_warm: bool, is_signed: bool
) -> None:
    keys = frozenset({generate_key(tmp_path / "my.key")})
    options = ModelOptions(
        bundle=tmp_path,
        acceptance=TrustPolicy(keys=keys if is_signed else frozenset()),
        model_dir=tmp_path,
        require_warm=require_warm,
        num_threads=1,
    )

    assert options.hashes is (require_warm or is_signed)


# Prewarming hyper-connections


CLASSES = ((64, 4), (128, 2), (160, 1))
MHC = tuple(MhcEntry(tokens, n, sublayer) for tokens, n in CLASSES for sublayer in ("attn", "ffn"))
SPLITS = StepSplits("sglang-pr25810", 4, 512, 4)


class Bound(BoundProgram):
    """A program of one input."""

    def __init__(self, spec: TensorSpec, run: Callable[[Any], Any]) -> None:
        self.inputs, self.run = (spec,), run


class Programs:
    """Programs that remember what they were run on."""

    def __init__(self, absent: tuple[Entry, ...] = ()) -> None:
        self.absent, self.ran = absent, list[tuple[Entry, tuple[int, ...], float]]()

    def get(self, entry: Entry) -> Any:
        if entry in self.absent:
            return None
        spec = TensorSpec(name="residual", shape=(1, entry.num_tokens, 4, 8), dtype="bfloat16")  # type: ignore[union-attr]

        def run(inputs: Any) -> None:
            self.ran.append((entry, tuple(inputs[0].shape), float(inputs[0].abs().sum())))

        return Bound(spec, run)


def test_every_program_runs_once_on_zeros_and_the_log_has_the_lines_of_the_server_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs = Programs()
    caplog.set_level(logging.INFO)

    warm = prewarm([PromptEntry(1, 160, 0), *MHC], programs.get)

    assert warm == {1, 2, 4}
    assert [(entry.num_tokens, entry.sublayer) for entry, _, _ in programs.ran] == [  # type: ignore[union-attr]
        (tokens, sublayer) for tokens in (160, 128, 64) for sublayer in ("attn", "ffn")
    ]
    assert all(shape[1] == entry.num_tokens and total == 0 for entry, shape, total in programs.ran)  # type: ignore[union-attr]
    assert caplog.messages[0] == "MHC prewarm max_num_tokens=160 representative token counts: (160, 128, 64)"
    assert len(caplog.messages) == 7
    assert caplog.messages[1].startswith("MHC prewarm path=attn num_tokens=160 completed in 0.")


def test_a_class_without_one_of_its_sublayers_is_not_warm() -> None:
    programs = Programs(absent=(MhcEntry(128, 2, "ffn"),))

    assert prewarm(MHC, programs.get) == {1, 4}


def test_a_model_without_hyper_connections_has_no_line_and_no_class(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    assert prewarm([PromptEntry(1, 160, 0)], Programs().get) == frozenset()
    assert caplog.messages == []
    assert SplitCounter(None, [PromptEntry(1, 160, 0)], frozenset()).counts({}) == ()


def test_steps_and_padded_tokens_are_counted_by_class() -> None:
    long, short, decode = PromptEntry(1, 160, 0), PromptEntry(2, 32, 0), DecodeEntry(4, 1, 8)
    counter = SplitCounter(SPLITS, [long, short, decode, *MHC], frozenset({1}))

    assert counter.counts({long: 2, short: 1, decode: 5}) == (
        SplitCounts(1, 2, 320, is_warm=True),
        SplitCounts(4, 6, 84, is_warm=False),
    )
    assert [counts.num_steps for counts in counter.counts({})] == [0, 0]
