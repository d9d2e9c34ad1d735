from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from tests import specs


def spec_of(**tables: Any) -> BuildSpec:
    return specs.spec_of(limits={"max_num_batched_tokens": 64}, **tables)


def test_our_own_scheduler_is_the_default_and_leaves_the_manifest_id_as_it_is() -> None:
    default, explicit = spec_of(), spec_of(scheduler={"engine": "aotgaudi", "chunked_prefill": True})

    assert "scheduler" not in default.to_json()
    assert Manifest.of(explicit).id == Manifest.of(default).id


def test_another_scheduler_is_written_and_read_back() -> None:
    spec = spec_of(scheduler={"engine": "vllm"})

    assert spec.to_json()["scheduler"] == {"engine": "vllm", "chunked_prefill": True}
    assert spec_from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("scheduler", "where"),
    [
        ({"engine": "aotgaudi", "chunked_prefill": False}, r"scheduler\.chunked_prefill"),
        ({"engine": "vllm", "chunked_prefill": False}, r"limits\.max_num_batched_tokens"),
    ],
)
def test_what_an_engine_does_not_do_is_refused(scheduler: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError, match=where):
        spec_of(scheduler=scheduler)
