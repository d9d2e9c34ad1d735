"""Tiny random models of several architectures, and what builds and loads them. Shared by the tests here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aotgaudi.backends.offline import probe_target
from aotgaudi.backends.online import make_runtime
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.bundle.programs import load_program
from aotgaudi.compile.pipeline import make_receipt
from aotgaudi.compile.plan import make_plan
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.entries import Entry
from aotgaudi.graphs.trace import stored_names
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Artifacts, Loader
from aotgaudi.runtime.weights import ShardReader
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store
from tests.workload import execute

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HYBRID = {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_COMPRESSED = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "partial_rotary_factor": 0.25,
    "sliding_window": 12,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {**_HYBRID, "query_pre_attn_scalar": 16},
    "mixtral": _EXPERTS,
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gpt_oss": {**_HYBRID, **_EXPERTS},
    "phi3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1},
    "deepseek_v4": _COMPRESSED,
}
BLOCK_SIZE = 16


def reference(architecture: str, seed: int = 0, **others: Any) -> Any:
    """Returns transformers' own model in float32 with eager attention and random weights of lively scale.

    `others` are keys of its configuration.
    """
    return random_model({**config_of(architecture), **others}, seed)


def config_of(architecture: str) -> dict[str, Any]:
    """Returns what its config.json says."""
    return {"model_type": architecture, **_COMMON, **ARCHITECTURES[architecture]}


def random_model(config: dict[str, Any], seed: int) -> Any:
    """Returns the same for a whole config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    around = 0.0 if config["model_type"].startswith("gemma") else 1.0
    scales = _SCALES if config["model_type"] == "deepseek_v4" else {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        usual = (0.0, 0.15) if parameter.dim() > 1 else (around, 0.1)
        middle, scale = next((found for end, found in scales.items() if name.endswith(end)), usual)
        parameter.data = middle + scale * noise
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            rows = (torch.randperm(model.config.n_routed_experts, generator=generator) for _ in buffer)
            buffer.data = torch.stack([row[: buffer.shape[1]] for row in rows])
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.1 * torch.randn(buffer.shape, generator=generator)
    model.tie_weights()
    return model


_SCALES = {
    **dict.fromkeys(("hc.scale", "hc_scale"), (1.0, 0.3)),
    **dict.fromkeys(("hc.base", "hc_base", "sinks", "position_bias"), (0.0, 0.5)),
    **dict.fromkeys(("hc.fn", "hc_fn"), (0.0, 0.05)),
}
"""What weights of DeepSeek V4 lie around, and how far, by the end of their names: they make its choices lively."""


def spec_of(
    model: Any,
    num_blocks: int = 40,
    dtype: str = "float32",
    *,
    quantization: str | None = None,
    block_size: int = BLOCK_SIZE,
) -> BuildSpec:
    """Returns a spec for the reference model: 4 rows and 64 tokens a step."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": max(64, block_size),
        "max_model_len": 256,
        "block_size": block_size,
        "num_blocks": num_blocks,
    }
    document = {
        "schema": "aotgaudi.spec/1",
        "model": {
            "name": model.config.model_type,
            "dtype": dtype,
            "config": config,
            "quantization": quantization,
        },
        "limits": limits,
    }
    return BuildSpec.model_validate_json(json.dumps(document))


def save_checkpoint(model: Any, path: Path) -> Path:
    """Writes the weights as a server reads them; returns the directory."""
    path.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    names = sorted(set(stored_names(model).values()))
    save_file({name: state[name].contiguous() for name in names}, path / "model.safetensors")
    return path


@dataclass(frozen=True)
class Built:
    """Entries of a spec, compiled into a store."""

    manifest: Manifest
    store: Store
    artifacts: Artifacts

    def runner(self, model_dir: Path) -> ProgramRunner:
        """Loads everything over one checkpoint."""
        return ProgramRunner(self._loaded(model_dir)[1], BLOCK_SIZE)

    def allocated(self, model_dir: Path) -> tuple[int, int]:
        """Loads everything, and returns the bytes of all that is bound of the checkpoint, and of the KV caches."""
        loader, table = self._loaded(model_dir)
        bound = {
            id(tensor): tensor
            for name, tensor in loader._tensors.items()
            if not name.startswith(("kv:", "const:"))
        }
        return sum(map(_num_bytes, bound.values())), sum(map(_num_bytes, table.caches))

    def _loaded(self, model_dir: Path) -> tuple[Loader, ExecutableTable]:
        table = ExecutableTable()
        table.declare_samplers(self.manifest.entries)
        limits = self.manifest.spec.limits
        weights, runtime = ShardReader(ModelDirectory(model_dir)), make_runtime(self.artifacts.receipt.target)
        loader = Loader(runtime, weights, limits.num_blocks)
        loader.load(self.manifest.entries, self.artifacts, table)
        return loader, table


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def build(spec: BuildSpec, entries: tuple[Entry, ...], store: Store, num_workers: int = 2) -> Built:
    """Compiles `entries` with the real CPU backend; what the store has already is not compiled again."""
    target = probe_target(spec.target)
    manifest = Manifest(spec, entries)
    outcome = execute(store, make_plan(entries, spec, target, store), num_workers, spec=spec)
    assert not outcome.failures, outcome.failures
    receipt = make_receipt(manifest, make_plan(entries, spec, target, store))
    assert not receipt.missing(entries)
    objects = store.objects
    return Built(
        manifest,
        store,
        Artifacts(
            receipt=receipt,
            program=lambda entry_id: load_program(
                objects.read(receipt.programs[entry_id]), receipt.programs[entry_id]
            ),
            read=objects.read,
            path=objects.path,
        ),
    )
