"""Hyper-connections through the whole build: entry, units, artifacts, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from aotgaudi.backends.online import make_runtime
from aotgaudi.graphs.hyper_connections import HcPreGraph
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Loader
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.store.store import Store
from tests.integration.models import build
from tests.workload import program_key

H, D, TOLERANCE = 4, 176, 1e-5
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
        "max_num_batched_tokens": 100,
        "max_model_len": 100,
        "block_size": 20,
        "num_blocks": 5,
    },
    "mhc": {"rule": "sglang-pr25810"},
    "target": {"backend": "cpu", "num_sms": 2},
}


def test_a_class_is_one_artifact_for_all_layers_sublayers_and_token_counts(
    store: Store, tmp_path: Path
) -> None:
    """11 blocks of 64 columns: up to 64 tokens in 2 partial sums, the first a block longer; above in one."""
    spec = BuildSpec.model_validate_json(json.dumps(SPEC))
    entries = Manifest.of(spec).of_kind("mhc")
    last = {entry.n_splits: entry.num_tokens for entry in entries}
    assert last.keys() == {1, 2}
    assert last[2] == 64

    built = build(spec, entries, store)
    table = ExecutableTable()
    Loader(make_runtime(built.artifacts.receipt.target), tmp_path, num_blocks=1).load(
        entries, built.artifacts, table
    )

    assert len(built.artifacts.receipt.units) == len(last)
    target = built.artifacts.receipt.target
    assert len({program_key(entry, spec, target) for entry in entries}) == len(entries)
    programs = {entry.n_splits: table.get(entry) for entry in entries}
    assert [table.get(entry) for entry in entries] == [programs[entry.n_splits] for entry in entries]
    for num_tokens in (1, 2, 63, 64, 65, max(last.values())):
        for layer in range(2):
            residual, *weights = example(num_tokens, seed=layer)
            found = {}
            for n_splits, program in programs.items():
                assert program is not None
                found[n_splits] = program.run([residual, *weights])
                pre = HcPreGraph(HyperConnections(H, D, 20, 1e-6, 1e-6), n_splits)
                for got, want in zip(found[n_splits], pre(residual[0], *weights), strict=True):
                    torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE)
            for one, other in zip(found[1], found[2], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
            assert not torch.equal(found[1][2], found[2][2]), "sums in another order have other last bits"


def example(num_tokens: int, seed: int) -> list[torch.Tensor]:
    """Streams and weights of one sublayer."""
    generator = torch.Generator().manual_seed(seed)
    num_mixes = (2 + H) * H
    shapes = ((1, num_tokens, H, D), (num_mixes, H * D), (3,), (num_mixes,))
    residual, fn, scale, base = (torch.randn(shape, generator=generator) for shape in shapes)
    return [residual, 0.05 * fn, scale, base]
