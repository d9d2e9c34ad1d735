"""The HPU backend on the double: a build that is proved, a server that compiles nothing, and what either refuses by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotgaudi.compile.cards import CardPool
from aotgaudi.compile.keys import ProofRow, UnitRow
from aotgaudi.compile.workers import Done
from aotgaudi.errors import AotGaudiError
from aotgaudi.gaudi.recipes import RecipeName
from aotgaudi.store.scratch import locked_directory
from tests.e2e.harness import Server, make_model
from tests.hpu.collecting import LABEL, LAYER, NOT_LOWERED, OTHER, SECONDS, Place
from tests.hpu.conftest import InstalledDouble
from tests.parallel import once, run_folder

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow]

NUM_TOKENS = 24
PROMPT = [5, 17, 300, 42, 9]
SPEC = """\
schema = "aotgaudi.spec/1"
[model]
name = "hpu-llama"
dtype = "float32"
config = "model/config.json"
[limits]
max_num_seqs = 2
max_num_batched_tokens = 16
max_model_len = 32
block_size = 16
num_blocks = 4
[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]
[defrag]
enabled = false
[target]
backend = "hpu"
"""


# A whole: from a spec to a server


@dataclass(frozen=True)
class Bench:
    """A folder with a model, a spec and the bundle that was built of it, on a double."""

    folder: Path
    double: Path

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

    def server(self, **settings: str) -> Server:
        command = ["serve", "--bundle", "b.bundle", "--model", "model", "--require-warm", "--port", "0"]
        return Server([sys.executable, "-m", "aotgaudi", *command], self.environment(**settings), self.folder)


@pytest.fixture(scope="session")
def bench(double: InstalledDouble, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """What one build has made."""
    made = Bench(run_folder(tmp_path_factory) / "hpu-bench", double("1.24.1"))

    def build() -> None:
        made.folder.mkdir()
        make_model(made.folder / "model")
        (made.folder / "spec.toml").write_text(SPEC, encoding="utf-8")
        done = made.run("build", "spec.toml", "-o", "b.bundle", "-j", "1")
        assert done.returncode == 0, done.stderr
        (made.folder / "build.txt").write_text(done.stdout, encoding="utf-8")

    once(tmp_path_factory, "hpu-bench", build)
    return made


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


def test_a_build_is_proved_and_a_second_one_starts_no_process_with_the_bridge(bench: Bench) -> None:
    journal = bench.folder / "second"

    again = bench.run("build", "spec.toml", "-o", "b2.bundle", AOTGAUDI_DOUBLE_JOURNAL=str(journal))

    first = (bench.folder / "build.txt").read_text(encoding="utf-8")
    assert "units compiled and checked" in first
    assert "in a directory that it could not write to, and compiled 0 (round 1)" in first
    assert again.returncode == 0, again.stderr
    assert "cache: nothing to do" in again.stdout
    assert not journal.exists()
    assert (bench.folder / "b2.bundle" / "receipt.json").read_bytes() == (
        bench.folder / "b.bundle" / "receipt.json"
    ).read_bytes()


def test_a_part_is_proved_by_itself_before_it_is_sealed(bench: Bench) -> None:
    done = bench.run("build", "spec.toml", "-o", "part.bundle", "--tier", "least")

    assert done.returncode == 0, done.stderr
    assert "proof: a new process found all" in done.stdout
    assert "part: 3 of 11 entries" in done.stdout


def test_an_upgrade_of_synapse_would_invalidate_all_that_is_built(bench: Bench) -> None:
    done = bench.run("build", "plan", "spec.toml", "--what-if", "synapse=1.25.0", "--json")

    answer = json.loads(done.stdout)
    assert answer["num_entries_invalidated"] == 11
    assert answer["units"]["certain"]


def test_a_check_compares_keys_and_numbers_and_says_why_not_bytes(bench: Bench) -> None:
    done = bench.run("build", "cache", "spec.toml", "--check", "--sample", "2")

    assert done.returncode == 0, done.stderr
    assert "2 units compiled again" in done.stdout
    assert "a recipe's bytes hold a counter of the process that compiled it" in done.stdout


@pytest.mark.parametrize("fault", ["", "eager-op-raises"])
def test_a_server_gives_the_tokens_of_transformers_and_the_bridge_compiles_nothing(
    bench: Bench, fault: str
) -> None:
    journal = bench.folder / f"served-{fault}"

    with bench.server(AOTGAUDI_DOUBLE_JOURNAL=str(journal), AOTGAUDI_DOUBLE_FAULTS=fault) as server:
        answers = [
            server.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"]
            for _ in range(2)
        ]
        compiled = server.metric("aotgaudi_compilations_total", cause="backend")
        log = server.log

    assert answers == [greedy_text(bench.folder / "model")] * 2
    assert "recipes found by the bridge, 0 compiled" in log
    assert compiled == 0
    assert "CACHE_HIT" in events(journal)
    assert not {"GRAPH_COMPILE", "CACHE_MISS", "CPU_FALLBACK"} & set(events(journal))


@pytest.mark.parametrize(
    ("settings", "component"),
    [
        (
            {"AOTGAUDI_DOUBLE_DEVICE": "gaudi3"},
            "target.machine: compiled for gaudi2, this machine has gaudi3",
        ),
        ({"AOTGAUDI_TEST_KERNELS": "libSynapse.so"}, "target.flags.env.GC_KERNEL_PATH"),
        ({"FUSER_ENABLE_LOW_UTILIZATION": "1"}, "target.flags.env.FUSER_ENABLE_LOW_UTILIZATION"),
    ],
)
def test_another_machine_is_refused_by_component(
    bench: Bench, settings: Mapping[str, str], component: str
) -> None:
    verified = bench.run("verify", "b.bundle", **settings)
    served = bench.run(
        *["serve", "--bundle", "b.bundle", "--model", "model", "--require-warm", "--port", "0"], **settings
    )

    assert (verified.returncode, served.returncode) == (5, 5), served.stderr
    assert component in verified.stderr
    assert component in served.stderr


def test_a_server_refuses_a_damaged_recipe_and_too_little_memory(bench: Bench, tmp_path: Path) -> None:
    serve = ["serve", "--model", "model", "--require-warm", "--port", "0", "--bundle"]
    damaged = tmp_path / "damaged.bundle"
    shutil.copytree(bench.folder / "b.bundle", damaged)
    receipt = json.loads((damaged / "receipt.json").read_bytes())
    unit = next(iter(receipt["units"].values()))
    digest = next(text for name, text in unit["artifact"].items() if name.endswith(".recipe"))
    (path,) = damaged.rglob(f"*{digest.split(':')[1][2:20]}*")
    path.chmod(0o600)
    path.write_bytes(b"x" + path.read_bytes()[1:])

    corrupt = bench.run(*serve, str(damaged))
    small = bench.run(*serve, "b.bundle", AOTGAUDI_DOUBLE_MEMORY_MIB="0")

    assert corrupt.returncode == 4, corrupt.stderr
    assert small.returncode == 5, small.stderr
    assert "the model does not fit on the card" in small.stderr
    assert "no number of KV blocks would fit" in small.stderr


def test_without_require_warm_a_bundle_is_refused_since_a_builder_would_need_the_card(bench: Bench) -> None:
    done = bench.run(*["serve", "--bundle", "b.bundle", "--model", "model", "--port", "0"])

    assert done.returncode == 5, done.stderr
    assert "served with --require-warm alone" in done.stderr


# A unit: what compiling and proving refuse


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong-numbers", "differs from eager"),
        ("", "not in a cluster: ['aten.addcmul"),
        ("const-tensor", "holds constants"),
        ("collision", LABEL),
        ("busy-card", "busy: another process has it"),
    ],
)
def test_a_unit_is_never_recorded_where_the_bridge_does_otherwise_than_it_must(
    newest: Path, tmp_path: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.backends.hpu.card._RETRY_SECONDS", 60.0)

    last = LAYER if fault else NOT_LOWERED
    found = Place(newest, tmp_path).compiled(OTHER, last, fault=fault)

    assert isinstance(found, AotGaudiError)
    assert found.exit_code == 6
    assert message in str(found)


def test_bridges_whose_keys_count_modules_get_pinned_keys(double: InstalledDouble, tmp_path: Path) -> None:
    old = double("1.19")

    refused = Place(old, tmp_path / "a").compiled()
    first = Place(old, tmp_path / "b", "pinned").compiled(LAYER)
    second = Place(old, tmp_path / "c", "pinned").compiled(OTHER, LAYER)

    assert "hpu.key_mode: is stable, this bridge's keys are pinned" in str(refused)
    assert isinstance(first, UnitRow)
    assert isinstance(second, UnitRow)
    assert first.artifact.keys() == second.artifact.keys()


def test_recipes_that_only_a_program_needs_are_found_by_the_proof_and_recorded(
    newest: Path, tmp_path: Path
) -> None:
    place = Place(newest, tmp_path)
    row = place.compiled(fault="late-recipe")
    assert isinstance(row, UnitRow)

    proof = place.proved(row, fault="late-recipe")

    assert isinstance(proof, ProofRow), proof
    assert proof.num_rounds == 3
    keys = {RecipeName.parse(name) for name in proof.recipes}
    assert len(keys) == 2
    assert None not in keys


def test_keys_that_never_repeat_in_another_process_are_refused_with_the_units_they_are_of(
    newest: Path, tmp_path: Path
) -> None:
    place = Place(newest, tmp_path)
    row = place.compiled(fault="key-unstable")
    assert isinstance(row, UnitRow)

    error = place.proved(row, fault="key-unstable")

    assert isinstance(error, AotGaudiError)
    assert error.exit_code == 6
    assert f"do not settle: {LABEL}" in str(error)


@pytest.mark.parametrize(("visible", "num_cards"), [("", 2), ("1", 1)])
def test_each_card_gets_one_worker_unless_the_vendors_variable_names_fewer(
    newest: Path, tmp_path: Path, visible: str, num_cards: int
) -> None:
    """A worker keeps its card, which the double gives to one process alone, so two that both compile have two."""
    place = Place(newest, tmp_path)

    def run() -> tuple[int, list[object]]:
        pool = CardPool(locked_directory(place.store.root), 1, tmp_path / "toolcache", SECONDS)
        with pool:
            for ticket, graph in enumerate((LAYER, OTHER)):
                pool.submit(ticket, place.job(graph))
            done: list[Done] = []
            while len(done) < 2:
                done += pool.wait(1.0)
        return pool.num_workers, [one.error for one in done]

    found = place.in_fork(run, AOTGAUDI_DOUBLE_CARDS="2", HABANA_VISIBLE_MODULES=visible)

    assert found == (1 + num_cards, [None, None])
