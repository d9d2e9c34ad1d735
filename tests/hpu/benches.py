"""Models that were built on the double: a folder with a spec, a bundle and a store, and servers of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.harness import Server, make_model
from tests.hpu.collecting import SECONDS
from tests.hpu.forks import double_environment

NUM_TOKENS = 32
NUM_SOME, NUM_MANY = 20, 500
PROMPT = [5, 17, 300, 42, 9]
SPEC = """\
schema = "aotgaudi.spec/1"
[model]
name = "hpu-llama"
dtype = "float32"
config = "model/config.json"
[limits]
max_num_seqs = 2
max_num_batched_tokens = 32
max_model_len = 64
block_size = 32
num_blocks = 4
[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]
[defrag]
enabled = false
[target]
backend = "hpu"
"""
DEFAULTS = """\
schema = "aotgaudi.spec/1"
[model]
name = "hpu-llama"
dtype = "bfloat16"
config = "model/config.json"
[limits]
max_num_seqs = 2
max_num_batched_tokens = 32
max_model_len = 64
block_size = 32
num_blocks = 6
[bucketing]
contiguous_pa = true
prefix_caching = false
[defrag]
threshold = 1
padded_swaps = [4]
[target]
backend = "hpu"
"""
"""As people serve: bfloat16, contiguous attention, and so the defragmenter, and the default settings of the sampler."""
SAMPLINGS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 1.0, "logprobs": 2},
    {"temperature": 0, "logit_bias": {"7": 5}},
)
"""A request for each graph that the default settings make."""
USERS = {
    "PT_HPU_RECIPE_CACHE_CONFIG": "theirs,true,1,true",
    "PT_HPU_INFERENCE_MODE": "1",
    "RANK": "3",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "8",
}
"""What a user may have set for another server: a directory that is emptied, evicts, has a rank's name, and four fields."""


@dataclass(frozen=True)
class Bench:
    """A folder with a model, a spec and the bundle that was built of it, on a double."""

    folder: Path
    double: Path
    spec: str = SPEC

    def environment(self, **settings: str) -> dict[str, str]:
        state = self.folder / "state"
        state.mkdir(exist_ok=True)
        places = {
            "AOTGAUDI_DOUBLE_STATE": str(state),
            "AOTGAUDI_STORE": str(self.folder / "store"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_RUNTIME_DIR": str(state),
        }
        return double_environment(self.double, **{**places, **settings})

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aotgaudi", *arguments],
            cwd=self.folder,
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def server(self, bundle: str = "b.bundle", **settings: str) -> Server:
        command = ["serve", "--bundle", bundle, "--model", "model", "--require-warm", "--port", "0"]
        words = [sys.executable, "-m", "aotgaudi", *command]
        return Server(words, self.environment(**settings), self.folder, start_seconds=SECONDS)

    def build(self, **settings: str) -> None:
        self.folder.mkdir()
        make_model(self.folder / "model")
        (self.folder / "spec.toml").write_text(self.spec, encoding="utf-8")
        done = self.run("build", "spec.toml", "-o", "b.bundle", "-j", "1", **settings)
        assert done.returncode == 0, done.stderr
        (self.folder / "build.txt").write_text(done.stdout, encoding="utf-8")


def events(journal: Path) -> list[str]:
    if not journal.exists():
        return []
    lines = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    return [line["event"] for line in lines if "event" in line]


def greedy_text(model: Path, margin: float = 0.0) -> str:
    """What transformers gives in float32 on the CPU, up to the first token that is likeliest by less than a `margin`."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        found = reference.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        best = reference(found).logits[0, len(PROMPT) - 1 : -1].topk(2).values
    is_close = (best[:, 0] - best[:, 1] < margin).tolist()
    sure = is_close.index(True) if True in is_close else NUM_TOKENS
    tokens = [int(token) for token in found[0, len(PROMPT) : len(PROMPT) + sure]]
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens))


def ask_for_a_mix(
    server: Server, num_requests: int, samplings: Sequence[Mapping[str, Any]] = ({"temperature": 0},)
) -> None:
    """Prompts of 1 to 56 tokens, answers of 1 to 8, two at a time, in turn with each of `samplings`; the seed is fixed."""
    draw = random.Random(26)
    asked = [
        {
            "prompt": [draw.randrange(300) for _ in range(draw.randint(1, 56))],
            "max_tokens": draw.randint(1, 8),
            "ignore_eos": True,
            **samplings[number % len(samplings)],
        }
        for number in range(num_requests)
    ]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda one: server.complete(**one), asked)
        found = [answer["usage"]["completion_tokens"] for answer in answers]
    assert found == [one["max_tokens"] for one in asked]
