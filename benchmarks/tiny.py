"""A tiny model with random weights, and specs of it that enumerate to many buckets or to one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import ROOT

CONFIG = ROOT / "manifests" / "configs" / "tiny-llama.json"
DTYPE = "float32"

LIMITS = {
    "many": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "block_size": 16,
        "num_blocks": 256,
    },
    "one": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "max_model_len": 16,
        "block_size": 16,
        "num_blocks": 256,
    },
}
"""42 prompt and 37 decode buckets (the example of Gaudi's documentation has 36 and 42); the fewest that the
rules give, 2 and 1. The KV caches are equally large, so that only the number of entries differs."""


def spec_text(which: str) -> str:
    """Returns the TOML of a spec: `which` names the limits."""
    limits = "\n".join(f"{name} = {value}" for name, value in LIMITS[which].items())
    return f"""schema = "aotgaudi.spec/1"

[model]
name = "tiny-llama"
dtype = "{DTYPE}"
config = {json.dumps(str(CONFIG))}

[limits]
{limits}

[sampler]
settings = [{{ temperature = 0.0, top_p = 1.0, top_k = 0 }}]

[defrag]
enabled = false

[target]
backend = "cpu"
"""


def write_spec(which: str, folder: Path) -> Path:
    """Writes a spec into `folder` and returns its path."""
    path = folder / f"tiny-llama.{which}.toml"
    path.write_text(spec_text(which), encoding="utf-8")
    return path


def write_model(folder: Path) -> Path:
    """Writes a model directory with random weights and a byte-level tokenizer; returns it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    values = json.loads(CONFIG.read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**values)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPE)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def main() -> None:
    """Writes the model directory and both specs into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    print(write_model(folder / "model"), *(write_spec(which, folder) for which in LIMITS), sep="\n")


if __name__ == "__main__":
    main()
