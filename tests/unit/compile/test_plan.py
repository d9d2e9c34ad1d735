"""The plan: what counts as there, and what it says of the rest."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.fake import probe
from aotgaudi.compile.pipeline import make_receipt
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.digest import Digest
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry, SamplerEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store
from tests.workload import SPEC_TEXT, execute, key_of, seed, seeded_plan, text_of, tiny_spec

ENTRIES = (DefragEntry(1), DefragEntry(2))
LABELS = (("swap a", "layer b"), ("swap a",))
Row = dict[str, Any]


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store.open(tmp_path_factory.mktemp("built") / "store")
    execute(store, seeded_plan(store, LABELS), 0)
    return store.root


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Store:
    """A store in which everything of `ENTRIES` is there."""
    return Store.open(shutil.copytree(built_once, tmp_path / "built"))


def plan_of(store: Store, spec: BuildSpec | None = None) -> Plan:
    return make_plan(ENTRIES, spec or tiny_spec(), probe(), store)


def test_what_is_built_is_complete(built: Store) -> None:
    plan = plan_of(built)

    assert plan.is_complete
    assert set(plan.units) == {key_of("swap a"), key_of("layer b")}
    assert plan.estimate_seconds(1) == 0


def test_an_empty_store_has_everything_to_trace(store: Store) -> None:
    plan = plan_of(store)

    assert [state.entries for state in plan.untraced] == [(entry,) for entry in ENTRIES]
    assert plan.missing_units == {}
    assert plan.estimate_seconds(2) > 0


def test_traced_programs_name_the_units_that_are_missing(store: Store) -> None:
    plan = seeded_plan(store, LABELS)

    assert plan.untraced == ()
    assert plan.missing_units == {key_of("swap a"): "swap a", key_of("layer b"): "layer b"}
    assert plan.estimate_seconds(1) == 4.0 + 7.0
    assert plan.estimate_seconds(2) == (4.0 + 7.0) / 2


def test_entries_with_one_key_share_a_program(store: Store) -> None:
    settings = [(0.7, 0.9, 50, True), (0.3, 0.95, 20, False), (0.0, 1.0, 0, True)]
    entries = [SamplerEntry(1, *setting) for setting in settings]

    plan = make_plan(entries, tiny_spec(), probe(), store)

    assert [state.entries for state in plan.programs] == [tuple(entries[:2]), (entries[2],)]


DAMAGES: dict[str, Callable[[Row], object]] = {
    "a field is missing": lambda row: row.pop("label", row.pop("program", None)),
    "an unknown field": lambda row: row.update(extra=1),
    "another type": lambda row: row.update(components=["a"]),
    "empty": lambda row: row.clear(),
    **{
        f"the digest {text!r}": lambda row, text=text: (
            row["artifact"].update({"unit.bin": text}) if "artifact" in row else row.update(program=text)
        )
        for text in ("", "nonsense", "sha256:abc:1", "sha256:" + "0" * 64 + ":x", "md5:0:0")
    },
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_malformed_row_is_a_miss(built: Store, damage: Callable[[Row], object]) -> None:
    for key in (key_of("layer b"), plan_of(built).programs[1].key.hex):
        row = built.actions.get(key)
        assert row is not None
        damage(row)
        built.actions.put(key, row)

    plan = plan_of(built)

    assert plan.missing_units == {key_of("layer b"): "layer b"}
    assert [state.entries for state in plan.untraced] == [(DefragEntry(2),)]


def test_a_unit_whose_object_is_gone_is_a_miss_and_is_built_again(built: Store) -> None:
    artifact = plan_of(built).units[key_of("layer b")].artifact
    built.objects.discard(artifact["unit.bin"])

    plan = plan_of(built)
    assert plan.missing_units == {key_of("layer b"): "layer b"}
    (row,) = execute(built, plan, 0).compiled
    assert row.artifact == artifact


@pytest.mark.parametrize("gone", ["program", "text"])
def test_a_program_whose_object_is_gone_is_traced_again(built: Store, gone: str) -> None:
    row = plan_of(built).programs[1].row
    assert row is not None
    digest = row.program if gone == "program" else str(Digest.of(text_of("swap a").encode()))
    built.objects.discard(Digest.parse(digest))

    assert DefragEntry(2) in [state.entries[0] for state in plan_of(built).untraced]


def test_a_receipt_leaves_out_programs_that_lack_a_unit(built: Store) -> None:
    from aotgaudi.manifest.manifest import Manifest

    built.actions.discard(key_of("layer b"))

    receipt = make_receipt(Manifest.of(tiny_spec()), plan_of(built))

    assert set(receipt.programs) == {DefragEntry(2).id}
    assert set(receipt.units) == {key_of("swap a")}


def test_steps_are_estimated_to_cost_more_than_samplers(store: Store) -> None:
    def seconds(entry: PromptEntry | DecodeEntry | SamplerEntry) -> float:
        return make_plan([entry], tiny_spec(), probe(), store).estimate_seconds(1)

    assert seconds(PromptEntry(1, 16, 0)) == seconds(DecodeEntry(1, 1, 1))
    assert seconds(DecodeEntry(1, 1, 1)) > seconds(SamplerEntry(1, 0.0, 1.0, 0, batch_changed=True))


def test_a_program_of_another_model_is_no_hit(built: Store) -> None:
    spec = tiny_spec()
    other = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "bfloat16"})})

    assert len(plan_of(built, other).untraced) == 2
    seed(built, other, ENTRIES, LABELS)
    assert plan_of(built, other).is_complete


@pytest.mark.process
def test_planning_imports_no_torch(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.toml"
    spec.write_text(SPEC_TEXT, encoding="utf-8")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from aotgaudi.manifest.manifest import Manifest\n"
        "from aotgaudi.compile.pipeline import make_receipt, plan_manifest\n"
        "from aotgaudi.spec.parse import load_spec\nfrom aotgaudi.store.store import Store\n"
        f"manifest = Manifest.of(load_spec(Path({str(spec)!r})))\n"
        f"plan = plan_manifest(manifest, Store.open(Path({str(tmp_path / 'store')!r})))\n"
        "make_receipt(manifest, plan)\n"
        "import aotgaudi.compile.run\n"
        "sys.exit(' '.join({'torch', 'numpy', 'transformers', 'safetensors'} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert process.stderr.strip() == ""
