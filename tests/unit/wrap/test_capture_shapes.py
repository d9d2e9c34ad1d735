"""A command with the shapes of a spec: what is added to it, and what it is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.wrap.launch import shaped_command
from tests.guests_here import vllm_here
from tests.specs import spec_tables

pytestmark = pytest.mark.process

ROOT = Path("/run/aotgaudi")


def test_a_vllm_gaudi_command_gets_the_table_and_what_pins_it(tmp_path: Path) -> None:
    here = vllm_here(tmp_path)
    here.install("vllm-gaudi", "0.27.0")
    words = (str(here.folder / "bin" / "vllm"), "serve", str(here.model()), "--port", "8001")
    spec = spec_from_json(spec_tables(scheduler={"engine": "vllm"}))

    found = shaped_command(words, here.environ, spec, ROOT)

    assert found.found.adapter.name == "vllm-gaudi"
    assert found.found.flags.values["num-gpu-blocks-override"] == "24"
    assert found.found.environ["VLLM_BUCKETING_FROM_FILE"] == "/run/aotgaudi/cache/shapes/vllm.buckets"
    assert list(found.shapes.files) == ["cache/shapes/vllm.buckets"]
    assert found.shapes.manifest_id is not None
    with pytest.raises(SpecError, match="--num-gpu-blocks-override: is not given"):
        shaped_command(words, here.environ, None, ROOT)


def test_what_the_shapes_need_is_asked_at_their_own_level_alone(tmp_path: Path) -> None:
    here = vllm_here(tmp_path)
    here.install("sglang", "0.5.23")
    config = {
        "model_type": "deepseek_v4",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hidden_size": 4096,
        "max_position_embeddings": 16384,
    }
    limits = {"max_num_batched_tokens": 4096, "max_model_len": 8192, "num_blocks": 1024}
    target = {"backend": "fake", "num_sms": 132}
    spec = spec_from_json(spec_tables(config=config, limits=limits, mhc={"enabled": True}, target=target))
    words = (sys.executable, "-m", "sglang.launch_server", "--model-path", str(here.model()))

    found = shaped_command(words, here.environ, spec, ROOT)

    names = {request.name for request in found.shapes.requests}
    assert len(names) > 2
    assert names <= {request.name for request in found.asked("shapes").requests}
    assert not names & {request.name for request in found.asked("sampler").requests}
    assert found.found.flags.values["chunked-prefill-size"] == "4096"
    assert found.shapes.files == {}


def test_without_a_spec_nothing_is_added(tmp_path: Path) -> None:
    here = vllm_here(tmp_path)
    words = (str(here.folder / "bin" / "vllm"), "serve", str(here.model()))

    found = shaped_command(words, here.environ, None, ROOT)

    assert (found.found.words, found.shapes.files, found.shapes.manifest_id) == (words, {}, None)
    spec = spec_from_json(spec_tables())
    with pytest.raises(SpecError, match="--shapes: is of no use to vllm"):
        shaped_command(words, here.environ, spec, ROOT)
