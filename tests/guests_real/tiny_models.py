"""Small models whose tokens are the bytes, so that JSON can be written; weights at random.

A head has 32 values, the fewest for which vLLM 0.32 has attention on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_MOE: Mapping[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
GEMMA3: Mapping[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 1,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 32,
}
"""A window is a block of vllm-gaudi."""
BERT: Mapping[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "pad_token_id": 0,
}
_LORA_RANK = 8


def written_model(folder: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """A model without weights (vLLM draws them)."""
    folder.mkdir()
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fill = [f"<{number}>" for number in range(config["vocab_size"] - len(special) - len(letters))]
    vocabulary = {word: token for token, word in enumerate([*special, *letters, *fill])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    for name, content in (("config", config), ("tokenizer_config", settings), ("generation_config", {})):
        (folder / f"{name}.json").write_text(json.dumps(dict(content)))
    return folder


def add_weights(folder: Path) -> None:
    """Gives a model weights, the same each time."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if "ForCausalLM" in config.architectures[0] else AutoModel
    torch.manual_seed(0)
    kind.from_config(config).to(torch.bfloat16).save_pretrained(folder / "weights")
    (folder / "weights" / "model.safetensors").rename(folder / "model.safetensors")


def written_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the llama, in the form of peft, with weights that change its answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(seed)
    hidden = LLAMA["hidden_size"]
    shapes = {
        "self_attn.q_proj": (hidden, LLAMA["num_attention_heads"] * LLAMA["head_dim"]),
        "self_attn.v_proj": (hidden, LLAMA["num_key_value_heads"] * LLAMA["head_dim"]),
        "mlp.down_proj": (LLAMA["intermediate_size"], hidden),
    }
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, (num_in, num_out) in shapes.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(_LORA_RANK, num_in) / 8
            weights[f"{place}.lora_B.weight"] = torch.randn(num_out, _LORA_RANK) / 8
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": _LORA_RANK}
    config |= {"lora_alpha": 2 * _LORA_RANK, "target_modules": [name.rpartition(".")[2] for name in shapes]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
