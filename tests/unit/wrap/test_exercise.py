"""What a server is asked so that it compiles it, by level and by what its launch switches on; and what it is not asked."""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.launch import WarmUp, WarmUpLevel, WarmUpRequest
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.sglang import SGLANG
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.exercise import (
    LEVELS,
    Feature,
    ServerLimits,
    completion,
    exercise,
    generation,
    in_order_of_proof,
    line_of,
    not_exercised,
    read_requests,
    sampler_batches,
    start_batches,
    start_cost,
    with_adapters,
)
from aotgaudi.wrap.launch_machine import Device

TOKENS = st.none() | st.integers(1, 1 << 20)
ROOMS = st.builds(
    ServerLimits,
    max_model_len=TOKENS,
    max_num_seqs=st.none() | st.integers(1, 1 << 12),
    max_num_batched_tokens=TOKENS,
)
SWITCHES: dict[str, tuple[str, ...]] = {
    "LoRA adapters": ("--enable-lora", "--lora-modules", "sql=/a", '{"name": "chat", "path": "/b"}'),
    "speculative decoding": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    "tools": ("--enable-auto-tool-choice",),
    "prompts in chunks": ("--max-num-batched-tokens", "64", "--max-model-len", "512"),
    "embeddings": ("--runner", "pooling"),
}
ARCHITECTURES = {
    "LlamaForCausalLM": "text",
    "Qwen2VLForConditionalGeneration": "text",
    "LlamaModel": "embeddings",
    "BertForSequenceClassification": "classes",
    "InternLM2ForRewardModel": "answers of the kind reward",
}


def asked(level: WarmUpLevel, room: ServerLimits, **more: Any) -> WarmUp:
    return exercise(level, tuple(generation(room)), **more)


def features(*words: str, device: Device = "cuda", **config: Any) -> tuple[Feature, ...]:
    adapter = VLLM
    return adapter.features(adapter.read(["M", *words], {}), config, device)


@given(st.sets(st.integers(1, 300), min_size=1, max_size=5), st.none() | st.integers(2, 4096))
def test_batches_of_each_kind_of_sampling_fill_each_size_and_fit(
    sizes: set[int], longest: int | None
) -> None:
    found = list(sampler_batches(sorted(sizes), ServerLimits(max_model_len=longest)))

    assert len({request.name for request in found}) == len(found)
    kinds, sizes_with_greedy, sizes_seen = set(), [], []
    for request in found:
        bodies: list[Any] = [*[request.body] * request.copies, *request.beside]
        assert longest is None or all(len(b["prompt"]) + b["max_tokens"] <= longest for b in bodies)
        random = [body for body in bodies if body["temperature"]]
        if not random:
            sizes_with_greedy.append(len(bodies))
            continue
        truncations = {tuple(sorted({"top_k", "top_p", "min_p"} & body.keys())) for body in random}
        assert len(truncations) == 1
        num_seeded = sum("seed" in body for body in random)
        seeds = "none" if not num_seeded else "all" if num_seeded == len(random) else "some"
        kinds.add((len(bodies), *truncations, len(random) < len(bodies), seeds))
        sizes_seen.append((len(bodies), not num_seeded))
    assert sizes_with_greedy == sorted(sizes)
    assert sizes_seen == sorted(sizes_seen)  # Those with seeds come first.
    mixed = {1: [(False, "none"), (False, "all")]}
    mixed[2] = [*mixed[1], (False, "some"), (True, "none"), (True, "all")]
    assert kinds == {
        (size, truncation, *rest)
        for size in sizes
        for num in range(4)
        for truncation in itertools.combinations(("min_p", "top_k", "top_p"), num)
        for rest in mixed.get(size, [*mixed[2], (True, "some")])
    }


def test_batches_of_each_kind_are_requested_with_each_number_of_logprobs_and_without() -> None:
    found = list(sampler_batches([1, 2], ServerLimits(max_model_len=64), range(2)))

    assert len({request.name for request in found}) == len(found)

    def plain(request: WarmUpRequest) -> WarmUpRequest:
        bodies = [
            {n: v for n, v in one.items() if n != "logprobs"} for one in (request.body, *request.beside)
        ]
        name = request.name.partition(", logprobs")[0]
        return request.model_copy(update={"name": name, "body": bodies[0], "beside": tuple(bodies[1:])})

    for width in (None, 0, 1):
        same = [plain(one) for one in found if one.body.get("logprobs") == width]
        assert same == list(sampler_batches([1, 2], ServerLimits(max_model_len=64)))
    assert all(one.body.get("logprobs") == beside.get("logprobs") for one in found for beside in one.beside)


def test_a_server_that_refuses_logprobs_is_asked_for_fewer() -> None:
    requests = asked("sampler", ServerLimits(max_model_len=512, max_num_seqs=4, max_logprobs=0)).requests
    bodies = [body for one in requests for body in (one.body, *one.beside)]

    assert {body[name] for body in bodies for name in ("logprobs", "prompt_logprobs") if name in body} == {0}
    assert VLLM.read(["M", "--max-logprobs", "0"], {}).room.max_logprobs == 0
    assert VLLM.read(["M", "--max-logprobs", "-1"], {}).room.max_logprobs is None


@given(
    st.sets(st.integers(1, 300), min_size=1, max_size=5),
    st.none() | st.integers(2, 4096),
    st.lists(st.integers(0, 20), unique=True, max_size=6),
)
def test_a_start_has_a_seed_in_each_variant_of_each_function_of_the_sampler(
    sizes: set[int], longest: int | None, logprobs: list[int]
) -> None:
    found = list(start_batches(sizes, ServerLimits(max_model_len=longest), logprobs))

    assert len({request.name for request in found}) == len(found)
    assert all(request.at_start for request in found)
    below = 0
    for size in sorted(sizes):
        batches: list[Any] = [one.bodies for one in found if f"padded to {size}:" in one.name]
        variants: list[set[Any]] = [set(), set(), set()]
        for bodies in batches:
            assert len(bodies) == below + 1
            assert sum("seed" in body for body in bodies) == 1
            assert longest is None or all(len(b["prompt"]) + b["max_tokens"] <= longest for b in bodies)
            random = [body for body in bodies if body["temperature"]]
            assert len(bodies) - len(random) <= 1
            variants[0].add((len(random) < len(bodies), "min_p" in random[0]))
            variants[1].add(("top_k" in random[0], "top_p" in random[0]))
            variants[2].add(random[0].get("logprobs"))
        mixed = {False, below > 0}
        assert variants[0] == set(itertools.product(mixed, (False, True)))
        assert variants[1] == set(itertools.product((False, True), repeat=2))
        assert variants[2] == {None, *logprobs}
        assert len(batches) == max(4, len(variants[2])), "and no combination of them"
        below = size


TABLE_OF_128 = (1, 2, 4, 8, 12, 22, 40, 72, 128)
"""The decode batches of vllm-gaudi for 128 sequences."""


@pytest.mark.parametrize(
    ("sizes", "proved", "at_start"),
    [
        (TABLE_OF_128[:3], 295, 24),
        (TABLE_OF_128, 14_113, 680),
        ((1, 2, 4, 8, 14, 24, 42, 78, 140, 256), 27_833, 1_292),
    ],
)
def test_a_start_asks_for_a_twentieth_of_what_the_build_proves(
    sizes: tuple[int, ...], proved: int, at_start: int
) -> None:
    room = ServerLimits(max_model_len=8192)

    found = [
        sum(len(request.bodies) for request in requests)
        for requests in (sampler_batches(sizes, room), start_batches(sizes, room))
    ]

    assert found == [proved, at_start]


def test_a_proof_sends_what_a_start_sends_and_then_the_others_in_reverse() -> None:
    requests = [completion(name).model_copy(update={"at_start": name.isupper()}) for name in "AbCde"]

    assert in_order_of_proof(requests) == [0, 2, 4, 3, 1]


def test_what_a_start_costs_counts_every_copy_and_says_what_takes_more_than_a_minute() -> None:
    batch = completion("batch", copies=3, prompt=[1, 2], max_tokens=4).model_copy(
        update={"beside": ({"prompt": "a text", "n": 2, "max_tokens": 5},)}
    )
    requests = [batch, completion("proved").model_copy(update={"at_start": False})]

    short = start_cost(requests, [1.2, 99.0], asks_all=False)
    long = start_cost(requests, [1.2, 99.0], asks_all=True)

    assert short.model_dump() == {"requests": 4, "tokens": 3 * 6 + 2 + 10, "seconds": 2}
    assert (long.requests, long.seconds, long.asks_all) == (5, 101, True)
    assert long.why.endswith("each start sends all; the slowest: proved: 99 s, batch: 1 s")


def test_no_exercise_asks_nothing_but_what_its_owner_adds() -> None:
    own = completion("own")

    assert asked("none", ServerLimits()).requests == ()
    assert asked("none", ServerLimits(), own=[own]).requests == (own,)


def test_each_level_asks_what_the_one_before_it_asks() -> None:
    room = ServerLimits(max_model_len=512, max_num_seqs=4)
    shapes = [completion("one shape")]

    assert get_args(WarmUpLevel) == LEVELS
    names = [[one.name for one in asked(level, room, shapes=shapes).requests] for level in LEVELS]

    for fewer, others in itertools.pairwise(names):
        assert others[: len(fewer)] == fewer
        assert len(others) > len(fewer)
    assert names[-1][-1] == "one shape"


@given(level=st.sampled_from(LEVELS), room=ROOMS)
def test_names_are_unique_no_model_is_named_and_all_of_it_has_room(
    level: WarmUpLevel, room: ServerLimits
) -> None:
    requests = asked(level, room).requests

    names = [request.name for request in requests]
    assert len(set(names)) == len(names)
    for request in requests:
        assert "model" not in request.body
        assert not request.is_greedy or request.body["temperature"] == 0
        assert request.copies + len(request.beside) <= (room.max_num_seqs or 8)
        for body in (request.body, *request.beside):
            prompt, max_tokens = body["prompt"], body["max_tokens"]
            assert isinstance(max_tokens, int)
            if isinstance(prompt, list) and (room.max_model_len or 512) > 32:
                longest = room.max_model_len or (1 << 21)
                assert len(prompt) + max_tokens <= longest


@given(level=st.sampled_from(LEVELS), room=ROOMS)
def test_what_is_not_asked_is_listed_and_nothing_else(level: WarmUpLevel, room: ServerLimits) -> None:
    found = tuple(generation(room))
    whole = exercise(level, found)
    names = {request.name for request in whole.requests}

    gaps = not_exercised(found, whole)

    for feature in found:
        is_whole = not feature.gap and all(one.name in names for one in feature.requests)
        assert any(gap.startswith(f"{feature.name}: ") for gap in gaps) != is_whole


def test_an_exercise_is_the_same_each_time_and_can_be_sealed() -> None:
    whole = exercise("sampler", features(*SWITCHES["LoRA adapters"], vision_config={}))

    assert WarmUp.model_validate_json(whole.model_dump_json()) == whole
    assert whole == exercise("sampler", features(*SWITCHES["LoRA adapters"], vision_config={}))
    assert all(
        "beside" not in one
        for one in whole.model_dump(mode="json")["requests"]
        if "beside" not in one["name"]
    )


def test_the_kinds_that_are_known_to_compile_late_are_asked() -> None:
    requests = asked("sampler", ServerLimits()).requests
    bodies = [json.dumps(request.body) for request in requests]

    assert any(request.is_greedy for request in requests)
    for kind in ("logprobs", "prompt_logprobs", "top_k", "min_p", "repetition_penalty", "json_schema"):
        assert any(f'"{kind}"' in body for body in bodies), kind


def test_batches_mix_greedy_and_random_requests() -> None:
    mixed = [one for one in asked("sampler", ServerLimits(max_num_seqs=2)).requests if one.beside]

    assert {tuple(body["temperature"] for body in (one.body, *one.beside)) for one in mixed} == {
        (0, 0.8),
        (0, 0.5),
    }
    assert not [one for one in asked("sampler", ServerLimits(max_num_seqs=1)).requests if one.beside]


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_launch_switches_on_is_asked_for(name: str) -> None:
    plain, more = features(), features(*SWITCHES[name])

    (feature,) = [one for one in more if one.name == name]
    assert feature.requests
    assert feature not in plain
    assert not_exercised([feature], exercise("sampler", more)) == ()
    if feature.is_smoke:
        return
    assert not_exercised([feature], exercise("smoke", more)) == (
        f"{name}: --exercise smoke does not ask for it",
    )


def test_each_adapter_is_asked_alone_and_one_beside_none() -> None:
    (lora,) = [one for one in features(*SWITCHES["LoRA adapters"]) if one.name == "LoRA adapters"]

    assert {one.body["model"] for one in lora.requests} == {"sql", "chat"}
    assert [one for one in lora.requests if one.beside and "model" not in one.beside[0]]
    (gap,) = not_exercised(features("--enable-lora")[-1:], WarmUp(level="sampler"))
    assert gap == "LoRA adapters: no adapter is named by --lora-modules"


def test_requests_for_adapters_go_to_those_that_are_served_here() -> None:
    requests = exercise("sampler", features(*SWITCHES["LoRA adapters"])).requests
    plain = {index for index, one in enumerate(requests) if "model" not in one.body}

    def models(*here: str) -> set[object]:
        asked = with_adapters(requests, ("sql", "chat"), here)
        assert plain <= asked.keys()
        return {one.body["model"] for index, one in asked.items() if index not in plain}

    assert models("chat", "sql") == {"sql", "chat"}
    assert models("a", "b", "c") == {"a", "b"}
    assert models("a") == {"a"}
    assert models() == set()


@pytest.mark.parametrize(("device", "is_asked"), [("cpu", False), ("cuda", True)])
def test_a_vllm_that_drafts_is_not_asked_what_it_refuses_nor_on_a_cpu_what_it_would_end_of(
    device: Device, is_asked: bool
) -> None:
    """Seen with vLLM 0.32, wrapped or not: ``index 1530980992 is out of bounds``, and 500 for everybody."""
    found = features(*SWITCHES["speculative decoding"], device=device)

    whole = exercise("sampler", found)
    bodies = [json.dumps([one.body, *one.beside]) for one in whole.requests]
    assert not [body for body in bodies if "min_p" in body or "logit_bias" in body]  # They are refused.
    assert bool([body for body in bodies if "top_k" in body]) == is_asked
    gaps = [gap for gap in not_exercised(found, whole) if "top_k" in gap]
    names = ("batches of several kinds of sampling", "kinds of sampling")
    assert sorted(gap.partition(": ")[0] for gap in gaps) == ([] if is_asked else [*names])
    assert "top-k" in [one.name for one in exercise("sampler", features(device=device)).requests]


def test_a_model_is_asked_at_the_endpoints_that_its_server_has() -> None:
    for architecture, name in ARCHITECTURES.items():
        found = features(architectures=[architecture])
        assert found[0].name == name
        assert exercise("smoke", found).requests == found[0].requests
    found = features(architectures=["BertForSequenceClassification"], id2label={"0": "LABEL_0"})
    assert {request.path for request in exercise("sampler", found).requests} == {"/score"}  # With one label.


@pytest.mark.parametrize(("words", "is_cut"), [((), True), (("--max-model-len", "128"), False)])
def test_a_long_text_to_embed_is_cut_where_nobody_says_how_long_it_may_be(
    words: tuple[str, ...], is_cut: bool
) -> None:
    found = features("--runner", "pooling", *words)

    (long,) = [one for one in exercise("smoke", found).requests if one.name == "a long embedding"]
    assert long.body.get("truncate_prompt_tokens") == (-1 if is_cut else None)
    assert is_cut or len(json.dumps(long.body["input"]).split()) < 128


@pytest.mark.parametrize(
    ("words", "config", "gap"),
    [
        ((), {"audio_config": {}}, "audio: "),
        (("--enable-prompt-embeds",), {}, "prompts that are embeddings: "),
        (("--task", "reward"), {}, "answers of the kind reward: "),
        ((), {}, "prompts in chunks: --max-num-batched-tokens is not given"),
        ((), {"vision_config": {}}, "images: sizes other than"),
        (("-dp", "2"), {"vision_config": {}}, "images and sounds on each API server: "),
        (("-asc", "2"), {"audio_config": {}}, "images and sounds on each API server: "),
        (("-dp", "2", "--runner", "pooling"), {}, "each data-parallel rank: "),
    ],
)
def test_what_is_not_known_how_to_ask_is_listed(
    words: tuple[str, ...], config: dict[str, Any], gap: str
) -> None:
    found = features(*words, **config)

    assert [one for one in not_exercised(found, exercise("sampler", found)) if one.startswith(gap)]


def test_a_server_of_texts_has_no_gap_by_its_number_of_processes() -> None:
    plain, many = features(), features("-dp", "2", "--api-server-count", "4")

    assert plain == many
    one = features("-dp", "2", "-asc", "1", vision_config={})
    assert not [feature for feature in one if "API server" in feature.name]


def test_an_image_is_a_png_of_its_size() -> None:
    (found,) = [one for one in features(vision_config={}) if one.name == "images"]
    assert "images" not in [one.name for one in features("--language-model-only", vision_config={})]
    for request in found.requests:
        content: Any = request.body["messages"]
        data = base64.b64decode(content[0]["content"][1]["image_url"]["url"].partition(",")[2])
        width, height = struct.unpack(">II", data[16:24])

        assert request.name == f"an image of {width} x {height}"
        rows = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
        assert len(rows) == height * (width + 1)


def test_sglang_is_asked_for_embeddings_and_lists_what_it_is_not_asked() -> None:
    adapter = SGLANG
    flags = adapter.read(["--model-path", "M", "--is-embedding", "--lora-paths", "a=b"], {})

    found = adapter.features(flags, {}, "cuda")

    assert [one.name for one in found] == ["embeddings", "LoRA adapters"]
    assert not_exercised(found, exercise("sampler", found)) == (
        "LoRA adapters: --exercise FILE can ask for it",
    )


def write(folder: Path, *lines: str) -> Path:
    path = folder / "own.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_file_has_requests_as_openais_batches_do(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Ü"}], "temperature": 0}
    lines = (
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        "",
        json.dumps(
            {"url": "/v1/completions", "body": {"prompt": "x", "temperature": 0, "stream": True}, "more": 1}
        ),
        json.dumps({"url": "/v1/embeddings", "body": {"input": "x", "model": "other"}}),
    )

    requests = read_requests(write(tmp_path, *lines))

    assert [(one.name, one.path, one.is_greedy) for one in requests] == [
        ("own.jsonl:1 a", "/v1/chat/completions", True),
        ("own.jsonl:3", "/v1/completions", False),
        ("own.jsonl:4", "/v1/embeddings", False),
    ]
    assert requests[0].body == chat


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "own.jsonl:2"),
        ('{"url": "v1/completions", "body": {}}', "url"),
        ('{"url": "/v1/completions"}', "body"),
        ('{"url": "/v1 /x", "body": {}}', "url"),
        ('{"url": "/v1/completions", "body": {"a": NaN}}', "own.jsonl:2"),
        ('{"url": "/v1/completions", "body": {"a": 9007199254740993}}', "own.jsonl:2"),
        ('{"method": "GET", "url": "/v1/models", "body": {}}', "GET"),
        ('["/v1/completions"]', "own.jsonl:2"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, why: str) -> None:
    good = '{"url": "/v1/completions", "body": {"prompt": "x"}}'

    with pytest.raises(SpecError) as error:
        read_requests(write(tmp_path, good, line))

    assert why in str(error.value)
    assert "own.jsonl:2" in str(error.value)


def test_what_is_no_file_of_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="none, smoke, sampler, shapes"):
        read_requests(tmp_path / "sampelr")
    with pytest.raises(SpecError, match="has no request"):
        read_requests(write(tmp_path, "", " "))


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=5) | st.lists(st.booleans()),
        max_size=4,
    )
)
def test_a_line_that_we_write_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, body: dict[str, Any]
) -> None:
    path = write(tmp_path_factory.mktemp("line"), line_of("/v1/completions", body))

    (request,) = read_requests(path)

    assert (request.path, request.body) == ("/v1/completions", body)
