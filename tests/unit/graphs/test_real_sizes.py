"""DeepSeek V4 Flash's own sizes: traced and cut without weights, in a process whose time and memory are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECONDS, MIB = 60, 2048
_TRACE = """
import json, resource, sys, time
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.graphs.layer_reuse import reusing_layers
from aotgaudi.graphs.partition import partition_step
from aotgaudi.graphs.step import build_model, export_step
from aotgaudi.graphs.trace import stored_names
from tests.specs import limits_of

config = json.load(open("manifests/configs/deepseek-v4-flash.json"))
quantization = config.pop("quantization_config"), config.pop("expert_dtype")
limits = limits_of(
    max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=8192, block_size=128, num_blocks=4096
)

def cut(model, entry, is_reusing=True):
    names = stored_names(model)
    if not is_reusing:
        return partition_step(export_step(model, entry, limits, n_splits=16), names)
    with reusing_layers(model):
        return partition_step(export_step(model, entry, limits, n_splits=16), names)

found = {"pieces": {}}
model = build_model(config, "bfloat16")
for entry in (DecodeEntry(64, 1, 256), PromptEntry(1, 2048, 64)):
    found["pieces"][entry.kind] = [(piece.label, hash(piece.text)) for piece in cut(model, entry).pieces]
found["seconds"] = time.process_time()
found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
del model
config |= {"num_hidden_layers": 8, "compress_ratios": config["compress_ratios"][:8]}
model = build_model(config, "bfloat16")
stamped, full = (cut(model, DecodeEntry(64, 1, 256), is_reusing) for is_reusing in (True, False))
found["is_same"] = (stamped.pieces, stamped.outputs) == (full.pieces, full.outputs)
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_all_layers_are_few_units_and_reused_layers_are_what_a_full_trace_gives() -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }

    done = subprocess.run(
        [sys.executable, "-c", _TRACE], check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for pieces in found["pieces"].values():
        assert Counter(label for label, _ in pieces) == {"embedding": 1, "hc_pre": 86, "layer": 86, "head": 1}
        # Attention of three kinds, and experts with hash and with learned routing.
        assert Counter(dict(map(reversed, pieces)).values()) == {
            "embedding": 1,
            "hc_pre": 1,
            "layer": 5,
            "head": 1,
        }
    assert found["seconds"] < SECONDS
    assert found["peak_mib"] < MIB
    assert found["is_same"]
