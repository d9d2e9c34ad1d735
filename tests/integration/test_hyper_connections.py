"""Hyper-connections through the whole build: entry, units, artifacts, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from aotgaudi.backends.online import make_runtime
from aotgaudi.graphs.hyper_connections import HcPreGraph
from aotgaudi.manifest.enumerate import mhc_entries
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Loader
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.store.store import Store
from tests.integration.models import build
from tests.workload import program_key

H, D, TOLERANCE = 4, 176, 1e-4
SPEC = {
    "schema": "aotgaudi.spec/1",
    "model": {
        "name": "tiny-mhc",
        "dtype": "float32",
        "config": {
            "model_type": "deepseek_v4",
            "hidden_size": D,
            "hc_mult": H,
            "hc_sinkhorn_iters": 20,
            "max_position_embeddings": 128,
        },
    },
    "limits": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 7,
        "max_model_len": 7,
        "block_size": 7,
        "num_blocks": 1,
    },
    "mhc": {"rule": "sglang-pr25810"},
    "target": {"backend": "cpu", "num_sms": 2},
}


def test_compiled_hyper_connections_compute_what_eager_does(store: Store, tmp_path: Path) -> None:
    """11 blocks of 64 columns in 2 partial sums, the first a block longer; weights of two layers, one artifact."""
    spec = BuildSpec.model_validate_json(json.dumps(SPEC))
    entries = mhc_entries(spec)
    attn, ffn = entries
    assert (attn.num_tokens, attn.n_splits) == (7, 2)

    built = build(spec, entries, store)
    table = ExecutableTable()
    Loader(make_runtime(built.artifacts.receipt.target), tmp_path, num_blocks=1).load(
        entries, built.artifacts, table
    )

    assert len(built.artifacts.receipt.units) == 1
    target = built.artifacts.receipt.target
    assert program_key(attn, spec, target) != program_key(ffn, spec, target)
    program = table.get(attn)
    assert program is not None
    assert table.get(ffn) is program
    pre = HcPreGraph(HyperConnections(H, D, 20, 1e-6, 1e-6), attn.n_splits)
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        inputs = [torch.randn(spec.shape, generator=generator) for spec in program.inputs]
        residual, *weights = inputs
        for got, want in zip(program.run(inputs), pre(residual[0], *weights), strict=True):
            torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE)
