"""Builds one entry of a tiny model in a throw-away store, as any build does: whether that works, and how long it takes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from aotgaudi.compile.pipeline import Workers, compile_missing
from aotgaudi.compile.run import Watch
from aotgaudi.doctor.machine import MachineFinding
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import AotGaudiError, BuildInterruptedError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.store.store import Store

TRIAL_SECONDS = 180.0

_SPEC = {
    "schema": "aotgaudi.spec/1",
    "model": {
        "name": "trial",
        "dtype": "float32",
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "vocab_size": 64,
        },
    },
    "limits": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "max_model_len": 16,
        "block_size": 16,
        "num_blocks": 1,
    },
}


def try_to_compile(seconds: float = TRIAL_SECONDS, num_workers: int | None = None) -> MachineFinding:
    """Traces, compiles and checks a decode step (an embedding, a layer and a head), and returns the finding.

    Args:
        seconds: The most that a job may take, and after which no other begins: twice that at most, in all.
        num_workers: Processes; None: one a core.
    """
    manifest = Manifest.of(spec_from_json(_SPEC))
    entries = tuple(entry for entry in manifest.entries if isinstance(entry, DecodeEntry))[:1]
    began = time.monotonic()
    watch = Watch(should_stop=lambda: time.monotonic() - began > seconds)
    workers = Workers(num_workers, seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="aotgaudi-doctor-") as folder:
            store = Store.open(Path(folder) / "store")
            outcome = compile_missing(manifest, store, entries, workers, watch)
    except BuildInterruptedError:
        return _failed(f"took longer than {seconds:g} s", "a machine that is less busy, or --trial-timeout")
    except (AotGaudiError, OSError) as error:
        return _failed(" ".join(str(error).split()), "see the message; builds fail the same way")
    return MachineFinding(
        "trial compile",
        "ok",
        f"a decode step of a tiny model: {outcome.num_traced} program traced, {len(outcome.compiled)} units compiled"
        f" and checked in {time.monotonic() - began:.1f} s, from an empty store, with {workers.num_local} workers",
    )


def _failed(problem: str, remedy: str) -> MachineFinding:
    return MachineFinding("trial compile", "error", problem, remedy, ("build",))
