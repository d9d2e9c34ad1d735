"""Models that were built on the double: a folder with a spec, a bundle and a store, and servers of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness import Server, make_model
from tests.hpu.collecting import SECONDS

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
DIRECT = f'{SPEC}frontend = "direct"\n'
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
        inherited = {
            name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"
        }
        libraries = self.double / "usr" / "lib" / "habanalabs"
        (self.folder / "state").mkdir(exist_ok=True)
        return {
            **inherited,
            "PYTHONPATH": str(self.double),
            "PATH": f"{self.double / 'bin'}:{inherited['PATH']}",
            "LD_LIBRARY_PATH": str(libraries),
            "GC_KERNEL_PATH": str(libraries / settings.get("AOTGAUDI_TEST_KERNELS", "libtpc_kernels.so")),
            "AOTGAUDI_DOUBLE_STATE": str(self.folder / "state"),
            "AOTGAUDI_DOUBLE_COMPILE_MS": "1",
            "AOTGAUDI_STORE": str(self.folder / "store"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_RUNTIME_DIR": str(self.folder / "state"),
            **settings,
        }

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


def greedy_text(model: Path) -> str:
    """What transformers gives on the CPU."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
            torch.tensor([PROMPT]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    tokens = [int(token) for token in found[0, len(PROMPT) :]]
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens))


def ask_for_a_mix(server: Server, num_requests: int) -> None:
    """Prompts of 1 to 56 tokens, answers of 1 to 8, two at a time; the seed is fixed."""
    draw = random.Random(26)
    asked = [
        ([draw.randrange(300) for _ in range(draw.randint(1, 56))], draw.randint(1, 8))
        for _ in range(num_requests)
    ]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda one: server.complete(one[0], max_tokens=one[1], ignore_eos=True), asked)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [num for _, num in asked]
