"""``aotgaudi verify``: 0 whole, 3 missing, 4 corrupt; a table for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.backends.base import Target
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.cli.main import cli
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.codec import dumps
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import parse_spec
from aotgaudi.store.cas import ObjectStore

UNIT = "a" * 64
SPEC = """
schema = "aotgaudi.spec/1"
[model]
name = "tiny"
dtype = "float32"
config = { model_type = "llama", max_position_embeddings = 512 }
[limits]
max_num_seqs = 1
max_num_batched_tokens = 32
max_model_len = 32
block_size = 16
num_blocks = 8
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.of(parse_spec(SPEC, Path(".")))


def seal(manifest: Manifest, root: Path, *, num_cold: int = 0, manifest_id: str = "") -> Path:
    """Seals a bundle in which one program answers every entry but the first `num_cold`."""
    objects = ObjectStore(root / "store")
    call = Call(unit=UNIT, inputs=(), outputs=())
    program = Program(inputs=(), weights=(), caches=(), calls=(call,), outputs=())
    digest = str(objects.put_bytes(program.dumps()))
    receipt = Receipt(
        manifest_id=manifest_id or manifest.id,
        target=Target(backend="fake", machine="none"),
        programs={entry.id: digest for entry in manifest.entries[num_cold:]},
        units={UNIT: SealedUnit(artifact={"unit.so": str(objects.put_bytes(b"code"))}, tolerance=0.0)},
        builder={},
    )
    pack_bundle(dumps(manifest), receipt.manifest_id, receipt, objects, root / "bundle")
    return root / "bundle"


def damage(bundle: Path) -> None:
    (path,) = (p for p in (bundle / "objects").rglob("*") if p.is_file() and p.read_bytes() == b"code")
    path.chmod(0o644)
    path.write_bytes(b"c0de")


def test_a_whole_bundle_exits_with_0(manifest: Manifest, tmp_path: Path) -> None:
    result = run(seal(manifest, tmp_path))

    assert result.exit_code == 0, result.output
    assert f"manifest  {manifest.id}" in result.stdout
    assert f"entries   {len(manifest.entries)}, all answered" in result.stdout


def test_a_cold_entry_exits_with_3_and_is_named(manifest: Manifest, tmp_path: Path) -> None:
    result = run(seal(manifest, tmp_path, num_cold=1))

    assert result.exit_code == 3
    rows = [line.split("  ") for line in result.stderr.splitlines()]
    assert [str(manifest.entries[0]), "missing", "no program in the receipt"] in rows


def test_a_corrupt_object_exits_with_4(manifest: Manifest, tmp_path: Path) -> None:
    bundle = seal(manifest, tmp_path)
    damage(bundle)

    result = run(bundle)

    assert result.exit_code == 4
    assert f"and {len(manifest.entries) - 1} more  corrupt" in result.stderr
    assert "aotgaudi build cache MANIFEST" in result.stderr


@pytest.mark.parametrize(
    ("num_cold", "corrupt", "code"), [(0, False, 0), (1, False, 3), (0, True, 4), (1, True, 4)]
)
def test_json_says_the_same(
    manifest: Manifest, tmp_path: Path, num_cold: int, corrupt: bool, code: int
) -> None:
    bundle = seal(manifest, tmp_path, num_cold=num_cold)
    if corrupt:
        damage(bundle)

    result = run(bundle, "--json")
    document = json.loads(result.stdout)

    assert result.exit_code == code
    assert document["intact"] == (code == 0)
    assert document["manifest_id"] == manifest.id
    assert [row["entry"] for row in document["missing"]] == [str(e) for e in manifest.entries[:num_cold]]
    assert len(document["corrupt"]) == corrupt


def test_a_receipt_for_another_manifest_exits_with_4(manifest: Manifest, tmp_path: Path) -> None:
    result = run(seal(manifest, tmp_path, manifest_id="0" * 64))

    assert result.exit_code == 4
    assert "the receipt answers 0000" in result.stderr


def test_no_bundle_exits_with_2(tmp_path: Path) -> None:
    result = run(tmp_path / "none")

    assert result.exit_code == 2
    assert "no bundle at" in result.stderr
