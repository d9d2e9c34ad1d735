"""Models of other families, from a published checkpoint to answers over HTTP: a DeepSeek V4, nightly a V3, too.

The V4 has all kinds of layers, and three classes of hyper-connections.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.compile.keys import ProgramKeys, ProgramRow, read_rows
from aotgaudi.compile.pipeline import seal
from aotgaudi.digest import Digest
from aotgaudi.entries import DecodeEntry, MhcEntry, PromptEntry
from aotgaudi.errors import CorruptError
from aotgaudi.store.store import Store
from tests.e2e.harness import VOCAB_SIZE, Server, Workplace, copy_bundle, make_tokenizer, reseal
from tests.integration.models import config_of, random_model
from tests.parallel import nightly, once, run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 48
CLASSES = (1, 2, 4)
SPEC = """\
schema = "aotgaudi.spec/1"

[model]
name = "e2e-{name}"
dtype = "float32"
config = "model/config.json"

{limits}
block_size = 16

[sampler]
settings = [{{ temperature = 0.0, top_p = 1.0, top_k = 0 }}]

[defrag]
enabled = true
threshold = 1
padded_swaps = [4]

{bucketing}

[target]
backend = "cpu"
{rest}"""


@dataclass(frozen=True)
class Family:
    """A model and how it is served: its config, parts of a spec, prompts, and what a server says that was asked them."""

    config: Mapping[str, Any]
    limits: str
    bucketing: str
    prompts: Callable[[], list[list[int]]]
    rest: str = ""
    check: Callable[[Server], None] = lambda _: None

    @property
    def name(self) -> str:
        """Its `model_type`."""
        return str(self.config["model_type"])

    @property
    def spec(self) -> str:
        """The whole spec."""
        return SPEC.format(name=self.name, limits=self.limits, bucketing=self.bucketing, rest=self.rest)


def prompts_of_v4() -> list[list[int]]:
    """Ten prompts of 9 to 144 tokens; the last two begin as others do."""
    random = Random(2)
    found = [random.choices(range(5, VOCAB_SIZE), k=n) for n in (9, 50, 144, 37, 64, 101, 20, 80)]
    new = [random.choices(range(5, VOCAB_SIZE), k=n) for n in (20, 3)]
    return [*found, [*found[2][:64], *new[0]], [*found[5][:96], *new[1]]]


def prompts_of_v3() -> list[list[int]]:
    """Ten prompts of 20 to 40 tokens; each begins as one of two do."""
    random = Random(3)
    beginnings = [random.choices(range(5, VOCAB_SIZE), k=40) for _ in range(2)]
    return [
        [*beginnings[number % 2][: random.randrange(17, 38)], *random.choices(range(5, VOCAB_SIZE), k=3)]
        for number in range(10)
    ]


def check_classes(server: Server) -> None:
    """Each class was warmed before the first request, and each was used."""
    assert server.metric("aotgaudi_mhc_cold_steps_total") == 0
    for n_splits in CLASSES:
        assert server.metric("aotgaudi_mhc_steps_total", n_splits=str(n_splits)) > 0
    lines = re.findall(r"MHC prewarm .*", server.log)
    assert lines[0].endswith("max_num_tokens=160 representative token counts: (160, 128, 64)")
    assert [re.sub(r"[\d.]+s$", "", line) for line in lines[1:]] == [
        f"MHC prewarm path={path} num_tokens={tokens} completed in "
        for tokens in (160, 128, 64)
        for path in ("attn", "ffn")
    ]


_TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
V4 = Family(
    config={
        **config_of("deepseek_v4"),
        **_TOKENS,
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "max_position_embeddings": 256,
    },
    limits="[limits]\nmax_num_seqs = 3\nmax_num_batched_tokens = 160\nmax_model_len = 192\nnum_blocks = 14",
    bucketing="""[bucketing]
strategy = "tuned"
max_padding = 16.0
tuned = { prompts = [[96, 12], [160, 12]], decodes = [[3, 14]] }""",
    rest='num_sms = 4\n\n[mhc]\nrule = "sglang-pr25810"\n',
    prompts=prompts_of_v4,
    check=check_classes,
)
"""K is 4 * 256: 16 blocks, at most four parts. Of 4 SMs: 4 parts up to 64 tokens, 2 up to 128, then 1."""
V3 = Family(
    config={**config_of("deepseek_v3"), **_TOKENS, "num_hidden_layers": 2},
    limits="[limits]\nmax_num_seqs = 4\nmax_num_batched_tokens = 32\nmax_model_len = 96\nnum_blocks = 12",
    bucketing="""[bucketing]
strategy = "tuned"
tuned = { prompts = [[32, 0], [32, 6]], decodes = [[4, 12]] }""",
    prompts=prompts_of_v3,
)


def furnished(family: Family, factory: pytest.TempPathFactory) -> Workplace:
    """Two checkpoints, imported from their published form, and the bundle that serves both."""
    folder = run_folder(factory) / f"e2e-{family.name}"
    kept = os.environ.get("AOTGAUDI_TEST_STORE")
    store = Path(kept).absolute() if kept else folder / "store"
    found = Workplace(folder, folder / "x.toml", folder / "model", store, folder / "x.bundle")

    def furnish() -> None:
        folder.mkdir()
        for seed, to in enumerate((found.model, folder / "other")):
            published = folder / f"published-{seed}"
            random_model(dict(family.config), seed).save_pretrained(published)
            make_tokenizer(published)
            done = found.run("model", "import", published, to, "--dtype", "float32")
            assert done.returncode == 0, done.stderr
        found.spec.write_text(family.spec, encoding="utf-8")
        done = found.run(
            "build", found.spec, "-o", found.bundle, "--store", found.store, timeout_seconds=1500
        )
        assert done.returncode == 0, done.stderr

    once(factory, folder.name, furnish)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return furnished(V4, tmp_path_factory)


def expected(family: Family, seed: int, place: Workplace, asked: list[list[int]]) -> list[str]:
    """What transformers generates, one sequence at a time."""
    import torch
    from transformers import PreTrainedTokenizerFast

    model = random_model(dict(family.config), seed)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place.model / "tokenizer.json"))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    with torch.no_grad():
        answers = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in asked]
    return [tokenizer.decode(answer.tolist(), skip_special_tokens=True) for answer in answers]


@pytest.mark.parametrize("family", [V4, *nightly(V3)], ids=lambda family: family.name)
def test_texts_over_http_equal_those_of_transformers(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place, asked = furnished(family, tmp_path_factory), family.prompts()
    wanted = expected(family, 0, place, asked)
    assert len(set(wanted)) == len(wanted)

    with place.serve() as server, ThreadPoolExecutor(4) as pool:

        def answer(number: int) -> str:
            done = server.complete(asked[number], max_tokens=NUM_TOKENS, ignore_eos=True)
            return str(done["choices"][0]["text"])

        for order in (range(10), (7, 2, 9, 4, 1, 8, 3, 6, 5, 0)):
            for number, text in zip(order, pool.map(answer, order), strict=True):
                assert text == wanted[number]
        for _ in range(2):  # Alone, so that its blocks are still there the second time.
            assert answer(2) == wanted[2]

        assert server.metric("aotgaudi_preemptions_total") >= 5
        assert server.metric("aotgaudi_defrag_swaps_total") >= 50
        assert server.metric("aotgaudi_prefix_cache_hits_total") >= 100
        assert server.metric("aotgaudi_compilations_total") == 0
        family.check(server)


def test_another_checkpoint_is_served_by_the_same_artifacts(place: Workplace) -> None:
    asked = prompts_of_v4()[:2]

    with place.serve(model=place.folder / "other") as server:
        texts = [
            server.complete(p, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"] for p in asked
        ]

    assert texts == expected(V4, 1, place, asked)


def test_there_are_as_many_artifacts_as_classes_and_every_step_calls_its_own(place: Workplace) -> None:
    bundle = open_bundle(place.bundle)
    entries = bundle.manifest.entries
    units = {e: bundle.program(e.id).unit_keys() for e in entries if isinstance(e, MhcEntry)}
    of_class = {entry.n_splits: keys for entry, keys in units.items()}

    assert {entry.n_splits: entry.num_tokens for entry in units} == {1: 160, 2: 128, 4: 64}
    assert len(units) == 6
    assert len(set(units.values())) == 3
    for entry in entries:
        if isinstance(entry, (PromptEntry, DecodeEntry)):
            called = [call.unit for call in bundle.program(entry.id).calls]
            n_splits = {3: 4, 96: 2, 160: 1}[entry.num_tokens]
            assert {n: sum(unit in keys for unit in called) for n, keys in of_class.items()} == {
                **dict.fromkeys(CLASSES, 0),
                n_splits: 2 * V4.config["num_hidden_layers"],
            }


@pytest.mark.parametrize(
    ("was", "now", "classes"),
    [
        ("num_sms = 4", "num_sms = 2", {1: 160, 2: 64}),
        pytest.param('rule = "sglang-pr25810"', 'rule = "one"', {1: 160}, marks=pytest.mark.nightly),
    ],
)
def test_other_classes_need_other_steps_and_no_other_unit(
    was: str, now: str, classes: dict[int, int], place: Workplace, tmp_path: Path
) -> None:
    spec = place.folder / f"{len(classes)}-classes.toml"
    spec.write_text(V4.spec.replace(was, now), encoding="utf-8")
    bundle = tmp_path / "other.bundle"

    cached = place.run("build", "cache", spec, "--store", place.store, "--json")
    sealed = place.run("build", "bundle", spec, "-o", bundle, "--store", place.store)

    assert (cached.returncode, sealed.returncode) == (0, 0), cached.stderr + sealed.stderr
    assert json.loads(cached.stdout)["num_compiled"] == 0
    old, new = open_bundle(place.bundle), open_bundle(bundle)
    assert {e.n_splits: e.num_tokens for e in new.manifest.entries if isinstance(e, MhcEntry)} == classes
    for entry in new.manifest.entries:
        if isinstance(entry, (PromptEntry, DecodeEntry)):
            before, after = (set(b.program(entry.id).unit_keys()) for b in (old, new))
            is_of_another_class = entry.num_tokens < 160
            programs = {b.require_programs().programs[entry.id] for b in (old, new)}
            assert len(programs) == 1 + is_of_another_class
            assert len(after - before) == is_of_another_class  # The hyper-connections, of one unit.


def test_a_checkpoint_in_its_published_form_is_refused_with_what_converts_it(place: Workplace) -> None:
    refusal = place.refusal(model=place.folder / "published-0")

    assert (refusal.exit_code, refusal.has_listened) == (2, False)
    assert "aotgaudi model import" in refusal.output


def test_a_bundle_without_one_of_the_entries_does_not_start(place: Workplace, tmp_path: Path) -> None:
    without = copy_bundle(place.bundle, tmp_path / "without")
    gone = MhcEntry(128, 2, "ffn")
    reseal(
        without,
        lambda receipt: receipt.model_copy(
            update={"programs": {k: v for k, v in receipt.programs.items() if k != gone.id}}
        ),
    )

    refusal = place.refusal(bundle=without)

    assert (refusal.exit_code, refusal.has_listened) == (3, False)
    assert str(gone) in refusal.output


def test_a_bundle_whose_classes_name_each_others_units_does_not_start(
    place: Workplace, tmp_path: Path
) -> None:
    swapped = copy_bundle(place.bundle, tmp_path / "swapped")
    one, two = (
        (MhcEntry(tokens, n, "attn"), MhcEntry(tokens, n, "ffn")) for tokens, n in ((160, 1), (128, 2))
    )

    def change(receipt: Any) -> Any:
        programs: dict[str, Digest] = dict(receipt.programs)
        for left, right in zip(one, two, strict=True):
            programs[left.id], programs[right.id] = programs[right.id], programs[left.id]
        return receipt.model_copy(update={"programs": programs})

    reseal(swapped, change)
    refusal = place.refusal(bundle=swapped)

    assert (refusal.exit_code, refusal.has_listened) == (4, False)
    assert "(prompt, 1, 160, 12) has the hyper-connections of 1 partial sums; call" in refusal.output


def test_a_store_that_has_another_classs_program_for_an_entry_is_not_sealed(
    place: Workplace, tmp_path: Path
) -> None:
    bundle = open_bundle(place.bundle)
    keys = ProgramKeys(bundle.manifest.spec, bundle.require_programs().target)
    store = Store(tmp_path / "store", (place.store,))
    for sublayer in ("attn", "ffn"):
        entries = MhcEntry(160, 1, sublayer), MhcEntry(128, 2, sublayer)
        one, two = map(keys.hex_of, entries)
        row = read_rows(ProgramRow, store, (two,))[two]
        store.actions.put(one, row.model_dump(mode="json"), lambda _: False)

    with pytest.raises(
        CorruptError, match=r"\(prompt, 1, 160, 12\) has the hyper-connections of 1 partial sums"
    ):
        seal(bundle.manifest, store, tmp_path / "mixed.bundle")
