from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import StoreError
from aotgaudi.spec.bucketing import AxisBounds, BucketingSpec, DecodeBounds, PromptBounds, SlidingSpec
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import load_spec, spec_from_json, spec_tables, write_spec
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from aotgaudi.spec.scheduler import DefragSpec
from aotgaudi.spec.target import TargetSpec
from aotgaudi.spec.vision import VisionSpec
from tests.specs import limits_of

LIMITS = limits_of()
CONFIG: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 512}

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
AXES = st.builds(
    AxisBounds,
    min=st.none() | st.integers(0, 99),
    step=st.none() | st.integers(1, 99),
    max=st.none() | st.integers(0, 99),
    limit=st.none() | st.integers(1, 99),
    pad_max=st.none() | st.integers(0, 99),
    pad_percent=st.none() | st.integers(0, 50),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
BUCKETINGS = st.builds(
    BucketingSpec,
    strategy=st.sampled_from(["exponential", "linear", "padding_aware"]),
    contiguous_pa=st.booleans(),
    prefix_caching=st.booleans(),
    max_padding=st.floats(1, 100),
    sliding=st.none() | st.builds(SlidingSpec, threshold=st.integers(1, 9999)),
    prompt=st.builds(PromptBounds, batch_size=AXES, query_len=AXES, num_ctx_blocks=AXES),
    decode=st.builds(DecodeBounds, batch_size=AXES, num_blocks=AXES),
) | st.builds(BucketingSpec, strategy=st.just("file"), file_text=TEXT)
SETTINGS = st.builds(
    SamplerSetting,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 99),
    min_p=st.floats(0, 1),
    top_n_sigma=st.just(0.0) | st.floats(0, 100),
)
SPECS = st.builds(
    BuildSpec,
    schema=st.just("aotgaudi.spec/1"),
    model=st.builds(
        ModelSpec,
        name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        config=st.dictionaries(TEXT.map("x-{}".format), VALUES, max_size=4).map(
            lambda extra: {**extra, **CONFIG}
        ),
    ),
    limits=st.just(LIMITS),
    bucketing=BUCKETINGS,
    sampler=st.just(SamplerSpec())
    | st.builds(SamplerSpec, settings=st.lists(SETTINGS, min_size=1, max_size=3, unique=True).map(tuple)),
    defrag=st.builds(
        DefragSpec, enabled=st.booleans(), threshold=st.integers(1, 99), with_graphs=st.booleans()
    ),
    vision=st.builds(
        VisionSpec,
        enabled=st.booleans(),
        buckets=st.none() | st.lists(st.integers(1, 99), max_size=3).map(tuple),
        resolutions=st.just(()) | st.just(("10x20", "30x40x2")),
    ),
    target=st.just(TargetSpec())
    | st.builds(
        TargetSpec,
        backend=st.just("hpu"),
        execution_mode=st.sampled_from([None, "lazy"]),
    ),
)


def small(**parts: Any) -> BuildSpec:
    model = ModelSpec(name="tiny", dtype="float32", config=CONFIG)
    return BuildSpec(schema="aotgaudi.spec/1", model=model, limits=LIMITS, **parts)


def test_a_written_spec_is_short_and_names_its_config(tmp_path: Path) -> None:
    write_spec(tmp_path / "x.toml", small())

    assert (tmp_path / "x.toml").read_text(encoding="utf-8") == (
        'schema = "aotgaudi.spec/1"\n'
        "\n[model]\n"
        'name = "tiny"\ndtype = "float32"\nconfig = "x.config.json"\n'
        "\n[limits]\n"
        "max_num_seqs = 2\nmax_num_batched_tokens = 32\nmax_model_len = 128\nblock_size = 16\nnum_blocks = 24\n"
        "\n[bucketing]\n"
        'strategy = "exponential"\nversion = "vllm-gaudi@091bbad"\ncontiguous_pa = false\nprefix_caching = true\n'
    )
    assert {path.name for path in tmp_path.iterdir()} == {"x.toml", "x.config.json"}


def test_a_bucket_file_lies_beside_it(tmp_path: Path) -> None:
    spec = small(bucketing=BucketingSpec(strategy="file", file_text="(1, 128, 0)\n(1, 1, 8)\n"))
    write_spec(tmp_path / "x.toml", spec)

    assert (tmp_path / "x.buckets.txt").read_text(encoding="utf-8") == "(1, 128, 0)\n(1, 1, 8)\n"
    assert load_spec(tmp_path / "x.toml") == spec


def test_other_line_ends_survive(tmp_path: Path) -> None:
    spec = small(bucketing=BucketingSpec(strategy="file", file_text="(1, 128, 0)\r\n\r(1, 1, 8)\n"))
    write_spec(tmp_path / "x.toml", spec)

    assert load_spec(tmp_path / "x.toml") == spec


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        write_spec(tmp_path / "none" / "x.toml", small())


@given(SPECS)
def test_what_is_written_loads_to_an_equal_spec(spec: BuildSpec) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.toml"
        write_spec(path, spec)

        assert load_spec(path) == spec


@given(SPECS)
def test_the_tables_alone_are_the_spec(spec: BuildSpec) -> None:
    assert spec_from_json(spec_tables(spec)) == spec
