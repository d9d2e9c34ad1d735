"""Tail pages over HTTP: a model with a window gives the same texts in fewer pages than blocks, by units of one without."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from aotgaudi.bundle.bundle import open_bundle
from tests.e2e.harness import SPEC, Workplace

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_BLOCKS, NUM_PAGES = 12, 8, 6
TABLE = """\
[bucketing]
strategy = "tuned"
max_padding = 16.0
tuned = { prompts = [[16, 4]], decodes = [[2, 8]] }

[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]

"""


def prompts() -> list[list[int]]:
    """Two of three begin with the same 33 tokens. All grow from four blocks to five, of which there are 8 for two."""
    random = Random(4)
    common = random.choices(range(3, 500), k=33)
    starts = [common if n % 3 else [] for n in range(9)]
    return [
        [*start, *random.choices(range(3, 500), k=58 + n % 5 - len(start))] for n, start in enumerate(starts)
    ]


def windowed(workplace: Workplace, folder: Path) -> Workplace:
    """The same weights as a mistral, which reads 16 tokens back, and a spec with tail pages."""
    shutil.copytree(workplace.model, folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    path.write_text(json.dumps(config | changes), encoding="utf-8")
    before, rest = SPEC.split("[sampler]")
    limits = f"num_blocks = {NUM_BLOCKS}\nnum_tail_pages = {NUM_PAGES}"
    before = before.replace("num_blocks = 6", limits).replace("max_model_len = 64", "max_model_len = 80")
    text = before + TABLE + rest[rest.index("[defrag]") :]
    (folder / "tails.toml").write_text(text, encoding="utf-8")
    return replace(
        workplace,
        folder=folder,
        spec=folder / "tails.toml",
        model=folder / "model",
        bundle=folder / "tails.bundle",
    )


def expected(place: Workplace, asked: list[list[int]]) -> list[str]:
    """What transformers generates, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(
        place.model, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place.model / "tokenizer.json"))
    texts = []
    with torch.no_grad():
        for prompt in asked:
            tokens = torch.tensor([prompt])
            for _ in range(NUM_TOKENS):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
            texts.append(tokenizer.decode(tokens[0, len(prompt) :].tolist(), skip_special_tokens=True))
    return texts


def test_texts_are_those_of_transformers_in_fewer_pages_than_blocks(
    workplace: Workplace, tmp_path: Path
) -> None:
    place, asked = windowed(workplace, tmp_path), prompts()
    done = place.run("build", place.spec, "-o", place.bundle, "--store", place.store)
    assert done.returncode == 0, done.stderr
    wanted = expected(place, asked)
    assert len(set(wanted)) > len(wanted) / 2

    with place.serve() as server, ThreadPoolExecutor(4) as pool:

        def answer(prompt: list[int]) -> str:
            done = server.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
            return str(done["choices"][0]["text"])

        assert list(pool.map(answer, asked)) == wanted
        for _ in range(2):  # Alone, so that its blocks and pages are still there the second time.
            assert answer(asked[1]) == wanted[1]

        assert server.metric("aotgaudi_preemptions_total") > 0
        assert server.metric("aotgaudi_defrag_swaps_total") > 0
        assert server.metric("aotgaudi_prefix_cache_hits_total") > 0
        assert server.metric("aotgaudi_compilations_total") == 0
        assert server.metric("aotgaudi_tail_pages_used") == 0
        assert server.metric("aotgaudi_tail_pages_free") == NUM_PAGES
        assert server.metric("aotgaudi_tail_pages_cached") > 0

    units = [
        {key for entry in b.manifest.entries for key in b.program(entry.id).unit_keys()}
        for b in map(open_bundle, (workplace.bundle, place.bundle))
    ]
    assert len(units[1] - units[0]) == 1, "a chunk after five blocks, which the other spec does not have"
