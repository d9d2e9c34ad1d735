"""Embeddings of a small Qwen3, as Qwen3-Embedding is used: from the spec to the official client, against transformers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from aotgaudi.errors import RequestError
from aotgaudi.llm import LLM
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from tests.e2e.harness import VOCAB_SIZE, Server, Workplace, make_tokenizer
from tests.parallel import once, run_folder

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 48
HIDDEN_SIZE = 64
SPEC = f"""\
schema = "aotgaudi.spec/1"

[model]
name = "tiny-embedding"
dtype = "float32"
config = "model/config.json"
runner = "pooling"

[limits]
max_num_seqs = 4
max_num_prefill_seqs = 2
max_num_batched_tokens = 32
max_model_len = {MAX_MODEL_LEN}
block_size = 16
num_blocks = 12

[bucketing]
strategy = "file"
file = "buckets.txt"
"""
BUCKETS = "(2, 16, 0)\n(1, 32, 3)\n"
"""Two entries cover every step: two short prompts at once, and a chunk after any context."""

TEXTS = ["the quick brown fox", "seven wizards", "a dog", "quietly mix a jar of potion " * 5]
"""The last has more tokens than a step."""


def _checkpoint(folder: Path) -> None:
    """Writes a checkpoint as Qwen3-Embedding's: names without a prefix, the pooling in sentence-transformers' files."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        matryoshka_dimensions=[16, 32],
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config).model
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    (folder / "1_Pooling").mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    make_tokenizer(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    pooling = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


def _furnish(place: Workplace) -> None:
    place.folder.mkdir()
    _checkpoint(place.model)
    place.spec.write_text(SPEC, encoding="utf-8")
    (place.folder / "buckets.txt").write_text(BUCKETS, encoding="utf-8")
    done = place.run("build", place.spec, "-o", place.bundle, "--store", place.store, "--model", place.model)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def embedding_place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = run_folder(tmp_path_factory) / "embeddings"
    kept = os.environ.get("AOTGAUDI_TEST_STORE")
    store = Path(kept).absolute() if kept else folder / "store"
    place = Workplace(folder, folder / "tiny.toml", folder / "model", store, folder / "tiny.bundle")
    once(tmp_path_factory, "embedding_place", lambda: _furnish(place))
    return place


@pytest.fixture(scope="module")
def embedder(embedding_place: Workplace) -> Iterator[Server]:
    with embedding_place.serve() as running:
        yield running
        assert running.metric("aotgaudi_compilations_total") == 0


@pytest.fixture
def client(embedder: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.base_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def tokens_of(embedding_place: Workplace) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(embedding_place.model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="module")
def references(embedding_place: Workplace, tokens_of: Any) -> dict[str, list[float]]:
    """The last token's normalized state of each text, by transformers in float32, one text at a time."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(embedding_place.model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = {text: model(torch.tensor([tokens_of(text)])).last_hidden_state[0, -1] for text in TEXTS}
    return {text: torch.nn.functional.normalize(state, dim=0).tolist() for text, state in states.items()}


def _agree(found: Sequence[float], expected: Sequence[float]) -> None:
    cosine = sum(a * b for a, b in zip(found, expected, strict=True)) / (
        math.hypot(*found) * math.hypot(*expected)
    )
    assert cosine >= 0.9999
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-5


def test_the_manifest_has_prompts_only(embedding_place: Workplace) -> None:
    spec = load_spec(embedding_place.spec)

    entries = Manifest.of(spec).entries

    assert [str(entry) for entry in entries] == ["(prompt, 1, 32, 3)", "(prompt, 2, 16, 0)"]
    assert (spec.model.pooler.pooling_type, spec.model.pooler.normalize) == ("LAST", True)


def test_embeddings_are_those_of_transformers_in_order(
    client: openai.OpenAI, embedder: Server, references: dict[str, list[float]], tokens_of: Any
) -> None:
    answer = client.embeddings.create(model=embedder.model_name, input=TEXTS, user="somebody")

    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    for text, item in zip(TEXTS, answer.data, strict=True):
        _agree(item.embedding, references[text])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(tokens_of(t)) for t in TEXTS)
    assert max(len(tokens_of(text)) for text in TEXTS) > 32, "one prompt is computed in chunks"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_every_form_of_input_gives_the_same(
    client: openai.OpenAI, embedder: Server, tokens_of: Any, encoding: Any
) -> None:
    text = TEXTS[0]
    inputs = [text, [text], tokens_of(text), [tokens_of(text)]]

    found = [
        client.embeddings.create(model=embedder.model_name, input=each, encoding_format=encoding)
        for each in inputs
    ]

    one = found[0].data[0].embedding
    assert all(answer.data[0].embedding == one for answer in found)
    assert isinstance(one, str) == (encoding == "base64")


def test_concurrent_requests_get_their_own(
    client: openai.OpenAI, embedder: Server, references: dict[str, list[float]]
) -> None:
    def ask(text: str) -> list[float]:
        return client.embeddings.create(model=embedder.model_name, input=text).data[0].embedding

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, TEXTS * 8))

    for text, embedding in zip(TEXTS * 8, found, strict=True):
        _agree(embedding, references[text])
    assert embedder.is_idle()


def test_a_cached_prefix_changes_nothing(
    client: openai.OpenAI, embedder: Server, references: dict[str, list[float]]
) -> None:
    before = embedder.metric("aotgaudi_prefix_cache_hits_total")

    found = [client.embeddings.create(model=embedder.model_name, input=TEXTS[3]).data[0] for _ in range(2)]

    for each in found:
        _agree(each.embedding, references[TEXTS[3]])
    assert embedder.metric("aotgaudi_prefix_cache_hits_total") > before


def test_dimensions_that_the_model_knows_are_cut_and_normalized(
    client: openai.OpenAI, embedder: Server, references: dict[str, list[float]]
) -> None:
    answer = client.embeddings.create(model=embedder.model_name, input=TEXTS[0], dimensions=16)

    kept = references[TEXTS[0]][:16]
    _agree(answer.data[0].embedding, [value / math.hypot(*kept) for value in kept])


def test_a_truncated_prompt_keeps_its_end(client: openai.OpenAI, embedder: Server, tokens_of: Any) -> None:
    ids = tokens_of(TEXTS[3])

    cut = client.embeddings.create(
        model=embedder.model_name, input=TEXTS[3], extra_body={"truncate_prompt_tokens": 5}
    )
    whole = client.embeddings.create(model=embedder.model_name, input=ids[-5:])

    assert cut.data[0].embedding == whole.data[0].embedding
    assert cut.usage.prompt_tokens == 5


def test_a_prompt_may_be_as_long_as_the_model(client: openai.OpenAI, embedder: Server) -> None:
    answer = client.embeddings.create(model=embedder.model_name, input=[5] * MAX_MODEL_LEN)

    assert answer.usage.prompt_tokens == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [[1], []]}, "input[1]", "at least 1 item"),
        ({"input": [5] * (MAX_MODEL_LEN + 1)}, "input", "max_model_len = 48"),
        ({"input": [VOCAB_SIZE]}, "input", "vocabulary"),
        ({"input": "a", "dimensions": 17}, "dimensions", "one of 16, 32"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "truncate_prompt_tokens": 49}, "truncate_prompt_tokens", "max_model_len"),
        ({"inputs": "a"}, "input", "Missing required parameter"),
        ({"input": "a", "messages": [1]}, "messages", "not supported"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_what_cannot_be_embedded_is_refused_by_name(
    embedder: Server, body: dict[str, Any], param: str, words: str
) -> None:
    response = embedder.post("/v1/embeddings", body)

    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert (error["param"], error["code"]) == (param, response.status_code)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_pooling_bundle_generates_nothing(embedder: Server, path: str, body: dict[str, Any]) -> None:
    response = embedder.post(path, body)

    assert response.status_code == 404
    assert 'runner = "pooling"' in response.json()["error"]["message"]
    assert embedder.post("/tokenize", {"prompt": "a"}).status_code == 200


def test_the_python_api_gives_the_servers_embeddings(
    embedding_place: Workplace, client: openai.OpenAI, embedder: Server
) -> None:
    with LLM(embedding_place.bundle, embedding_place.model, threads=1) as llm:
        found = llm.embed(TEXTS)
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate("a")

    served = client.embeddings.create(model=embedder.model_name, input=TEXTS, encoding_format="float")
    for one, item in zip(found, served.data, strict=True):
        _agree(one.embedding, item.embedding)


def test_every_command_about_bundles_knows_it(embedding_place: Workplace, tmp_path: Path) -> None:
    place = embedding_place
    commands = (
        ("verify", place.bundle),
        ("coverage", place.spec),
        ("build", "manifest", place.spec, "-o", tmp_path / "tiny.manifest.json"),
        ("build", "plan", place.spec, "--store", place.store),
        ("report", place.bundle, "-o", tmp_path / "report.html"),
        ("explain", place.spec, "--store", place.store),
    )

    for command in commands:
        done = place.run(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
