"""A model with latent attention, from a published checkpoint to its answers over HTTP."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.harness import VOCAB_SIZE, Workplace, make_tokenizer
from tests.parallel import once, run_folder

pytestmark = pytest.mark.nightly

NUM_TOKENS = 48
SPEC = """\
schema = "aotgaudi.spec/1"

[model]
name = "e2e-deepseek-v3"
dtype = "float32"
config = "model/config.json"

[limits]
max_num_seqs = 4
max_num_batched_tokens = 32
max_model_len = 96
block_size = 16
num_blocks = 12

[bucketing]
strategy = "tuned"
tuned = { prompts = [[32, 0], [32, 6]], decodes = [[4, 12]] }

[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]

[defrag]
enabled = true
threshold = 1
padded_swaps = [4]

[target]
backend = "cpu"
"""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def make_model(published: Path) -> Any:
    """Saves a DeepSeek V3 with random weights as `save_pretrained` does, experts apart, and returns it."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.15 * noise if parameter.dim() > 1 else 1 + 0.1 * noise
    model.save_pretrained(published)
    make_tokenizer(published)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The model, imported from its published form, and the bundle built for it."""
    folder = run_folder(tmp_path_factory) / "e2e-latent"
    kept = os.environ.get("AOTGAUDI_TEST_STORE")
    store = Path(kept).absolute() if kept else folder / "store"
    found = Workplace(folder, folder / "v3.toml", folder / "model", store, folder / "v3.bundle")

    def furnish() -> None:
        folder.mkdir()
        make_model(folder / "published")
        found.spec.write_text(SPEC, encoding="utf-8")
        steps = (
            ("model", "import", folder / "published", found.model, "--dtype", "float32"),
            ("build", found.spec, "-o", found.bundle, "--store", found.store),
        )
        for arguments in steps:
            done = found.run(*arguments, timeout_seconds=1200)
            assert done.returncode == 0, done.stderr

    once(tmp_path_factory, folder.name, furnish)
    return found


def prompts() -> list[list[int]]:
    """Ten prompts of 20 to 40 tokens; each begins as one of two do."""
    random = Random(3)
    beginnings = [random.choices(range(5, VOCAB_SIZE), k=40) for _ in range(2)]
    return [
        [*beginnings[number % 2][: random.randrange(17, 38)], *random.choices(range(5, VOCAB_SIZE), k=3)]
        for number in range(10)
    ]


def expected(place: Workplace, asked: list[list[int]]) -> list[str]:
    """What transformers generates, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = place.folder / "published"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    with torch.no_grad():
        answers = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in asked]
    return [tokenizer.decode(answer.tolist(), skip_special_tokens=True) for answer in answers]


def test_texts_over_http_equal_those_of_transformers(place: Workplace) -> None:
    asked = prompts()
    wanted = expected(place, asked)
    assert len(set(wanted)) == len(wanted)

    with place.serve() as server, ThreadPoolExecutor(4) as pool:

        def answer(number: int) -> str:
            done = server.complete(asked[number], max_tokens=NUM_TOKENS, ignore_eos=True)
            return str(done["choices"][0]["text"])

        for order in (range(10), (7, 2, 9, 4, 1, 8, 3, 6, 5, 0)):
            for number, text in zip(order, pool.map(answer, order), strict=True):
                assert text == wanted[number]

        assert server.metric("aotgaudi_preemptions_total") >= 5
        assert server.metric("aotgaudi_defrag_swaps_total") >= 50
        assert server.metric("aotgaudi_prefix_cache_hits_total") >= 100
        assert server.metric("aotgaudi_compilations_total") == 0
