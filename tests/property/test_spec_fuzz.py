"""No spec, however wrong, gives anything but a spec or a SpecError, and no spec takes for ever."""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.versions import VERSIONS
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest, dumps, loads
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import parse_spec, spec_from_json

MANIFESTS = Path(__file__).parents[2] / "manifests"
VALID: dict[str, Any] = {
    "schema": "aotgaudi.spec/1",
    "model": {
        "name": "tiny",
        "dtype": "float32",
        "config": {"model_type": "llama", "max_position_embeddings": 512, "num_attention_heads": 4},
        "quantization": {"method": "inc", "kv_cache_dtype": "fp8_inc", "config_sha256": "0" * 64},
    },
    "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "expert_parallel": True},
    "lora": {"max_loras": 2, "max_lora_rank": 8},
    "limits": {
        "allow_long_max_model_len": True,
        "max_num_seqs": 2,
        "max_num_prefill_seqs": 1,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "block_size": 16,
        "num_blocks": 24,
    },
    "bucketing": {
        "strategy": "exponential",
        "prompt": {"query_len": {"min": 16}},
        "sliding": {"threshold": 8},
    },
    "sampler": {"settings": [{"temperature": 0.5, "top_p": 0.9, "top_k": 4}]},
    "defrag": {"enabled": True, "padded_swaps": [4, 8]},
    "vision": {"enabled": True, "resolutions": ["100x100"]},
    "mhc": {"enabled": None},
    "target": {"backend": "cpu"},
}
TOML_SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-2, 2**33),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    st.sampled_from([10**400, -1, 0, 2**31 - 1, 2**53, math.nan, math.inf]),
    st.dates(),
    st.datetimes(),
    st.times(),
)
TOML_VALUES = st.recursive(
    TOML_SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a value, itself included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A valid spec with a few values replaced, added or taken away."""
    spec = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(spec) if path]))
        table: Any = spec
        for part in path[:-1]:
            table = table[part]
        if draw(st.booleans()):
            table[path[-1]] = draw(TOML_VALUES)
        else:
            del table[path[-1]]
    return spec


def has_dates(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, (datetime.date, datetime.time)) or any(map(has_dates, inner))


def refused_or_enumerated(make: Any) -> None:
    """Calls `make`; what is not refused must enumerate to a manifest that its file holds, or be refused then."""
    with contextlib.suppress(SpecError):
        spec = make()
        assert isinstance(spec, BuildSpec)
        manifest = Manifest.of(spec)
        assert loads(dumps(manifest)) == manifest


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_a_damaged_spec_is_a_spec_or_a_spec_error(value: dict[str, Any]) -> None:
    if not has_dates(value):
        refused_or_enumerated(lambda: spec_from_json(value))


@given(TOML_VALUES.filter(lambda value: not has_dates(value)))
def test_any_other_value_is_a_spec_error(value: Any) -> None:
    with pytest.raises(SpecError):
        spec_from_json(value)


@given(st.text(max_size=200))
def test_any_text_is_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        parse_spec(text, Path())


TEXTS = tuple(path.read_text(encoding="utf-8") for path in sorted(MANIFESTS.glob("*.toml")))


@given(st.sampled_from(TEXTS), st.data())
def test_a_text_with_a_piece_changed_is_a_spec_or_a_spec_error(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    piece = data.draw(
        st.text(max_size=5) | st.sampled_from(["2147483647", "1", "-1", "1e9", "nan", "[]", "{}"])
    )

    refused_or_enumerated(lambda: parse_spec(text[:start] + piece + text[end:], MANIFESTS))


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "9" * 5000,
        "a = " + "[" * 50_000,
        "a." * 5_000 + "b = 1",
        "[" + "a." * 5_000 + "a]",
        "a = {" + "a = {" * 5_000,
        "a = 1979-05-27",
        "limits = 1979-05-27T07:32:00",
        "model = 1",
        "model = []",
        "bucketing = 1",
        "bucketing.file = 1",
        "model.config = 1",
        "model.quantization = 1",
        "model.quantization.config = 1",
        'model.quantization.config = "\\u0000"',
        'model.config = "\\u0000"',
        'bucketing.file = "\\u0000"',
        'model.config = "."',
        "\x00",
        "\ud800",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_an_unusual_text_is_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, Path())

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


NUMBERS = st.one_of(
    st.integers(1, 300), st.sampled_from([2**k for k in range(32)] + [2**31 - 1, 10**6, 131072])
)
BOUNDS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("min", "step", "max", "limit", "pad_max"), NUMBERS)
    | {"pad_percent": st.integers(0, 50)},
)


@st.composite
def wide(draw: st.DrawFn) -> dict[str, Any]:
    """A spec that obeys the types, with numbers from the whole range."""
    version = draw(st.sampled_from(sorted(VERSIONS)))
    strategies = [name for name in VERSIONS[version].strategy_names if name != "file"]
    bucketing: dict[str, Any] = {
        "version": version,
        "strategy": draw(st.sampled_from(strategies)),
        "coverage": draw(st.sampled_from(["closed", "upstream"])),
        "contiguous_pa": draw(st.booleans()),
        "prefix_caching": draw(st.booleans()),
        "merged_prefill": draw(st.booleans()),
        "num_speculative_tokens": draw(st.sampled_from([0, 0, 1, 7, 1024])),
        "prompt": {name: draw(BOUNDS) for name in ("batch_size", "query_len", "num_ctx_blocks")},
        "decode": {name: draw(BOUNDS) for name in ("batch_size", "num_blocks")},
    }
    limits = {name: draw(NUMBERS) for name, value in VALID["limits"].items() if value is not True}
    limits["max_model_len"] = max(limits["max_model_len"], 2)
    limits["max_num_prefill_seqs"] = min(limits["max_num_prefill_seqs"], limits["max_num_seqs"])
    limits["max_num_batched_tokens"] = max(limits["max_num_batched_tokens"], limits["block_size"])
    limits["num_blocks"] = max(limits["num_blocks"], -(-limits["max_model_len"] // limits["block_size"]))
    config = {"model_type": "llama", "max_position_embeddings": 2**31 - 1}
    return {
        "schema": "aotgaudi.spec/1",
        "model": {"name": "wide", "dtype": "float32", "config": config},
        "limits": limits,
        "bucketing": bucketing,
    }


LONGEST_SECONDS = 60.0
"""Of processor time. Generous: the largest tables that are allowed take a few seconds of a slow core."""


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(wide())
def test_no_spec_takes_for_ever_or_gives_entries_that_a_manifest_cannot_hold(value: dict[str, Any]) -> None:
    started = time.process_time()

    with contextlib.suppress(SpecError):
        entries = enumerate_entries(spec_from_json(value))
        if len(entries) < 10_000:
            manifest = Manifest(spec_from_json(value), entries)
            assert loads(dumps(manifest)) == manifest

    assert time.process_time() - started < LONGEST_SECONDS
