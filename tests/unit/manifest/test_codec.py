from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import ManifestError
from aotgaudi.manifest.codec import dumps, loads, read_manifest, write_manifest
from aotgaudi.manifest.entries import ENTRY_KINDS, DecodeEntry, PromptEntry
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.schema import EntryTables, schema_files
from aotgaudi.spec.parse import spec_from_json

DOCS = Path(__file__).parents[3] / "docs"
SPEC = spec_from_json(
    {
        "schema": "aotgaudi.spec/1",
        "model": {
            "name": "tiny",
            "dtype": "float32",
            "config": {
                "model_type": "llama",
                "max_position_embeddings": 512,
                "eps": 1e-5,
                "x": {"b": 1, "a": 2},
            },
        },
        "limits": {
            "max_num_seqs": 2,
            "max_num_batched_tokens": 32,
            "max_model_len": 128,
            "block_size": 16,
            "num_blocks": 24,
        },
    }
)
MANIFEST = Manifest.of(SPEC)
DATA = dumps(MANIFEST)


def edited(**changes: Any) -> bytes:
    return json.dumps({**json.loads(DATA), **changes}).encode()


def test_file_form_survives_and_is_deterministic() -> None:
    assert loads(DATA) == MANIFEST
    assert dumps(loads(DATA)) == DATA
    assert dumps(Manifest.of(SPEC)) == DATA


def test_each_entry_has_a_line_of_its_own() -> None:
    lines = DATA.decode().splitlines()

    assert lines.count("        [1, 16, 0],") == 1
    assert sum(line.startswith("        [") for line in lines) == len(MANIFEST.entries)
    assert DATA.endswith(b"}\n")


def test_id_is_the_sha256_of_the_canonical_content_and_is_pinned() -> None:
    """A change of this id is a change of the format, or of a default: say so in the change."""
    assert json.loads(DATA)["id"] == MANIFEST.id
    assert MANIFEST.id == "5dc99a317eb18d9781b8235e05df302ff53754156534c4ee7fd839c66030abdd"


def test_formatting_and_key_order_do_not_matter() -> None:
    turned = json.dumps(dict(reversed(json.loads(DATA).items())), indent=7).encode()

    assert loads(turned) == MANIFEST


@given(st.randoms(use_true_random=False))
def test_id_does_not_depend_on_the_order_of_config_keys(random: Any) -> None:
    value = SPEC.to_json()
    keys = list(value["model"]["config"])
    random.shuffle(keys)
    value["model"]["config"] = {key: value["model"]["config"][key] for key in keys}

    shuffled = Manifest.of(spec_from_json(value))

    assert shuffled.id == MANIFEST.id
    assert dumps(shuffled) == DATA


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks"])
def test_id_changes_with_the_limits(name: str) -> None:
    value = SPEC.to_json()
    value["limits"][name] += 1

    assert Manifest.of(spec_from_json(value)).id != MANIFEST.id


def with_row(kind: str, row: list[Any]) -> bytes:
    content = json.loads(DATA)
    content["entries"][kind]["rows"].append(row)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "should be an object"),
        (edited(id="0" * 64), f"id: is {'0' * 64}, but the content hashes to {MANIFEST.id}"),
        (edited(id=MANIFEST.id.upper()), "id: is"),
        (
            edited(schema="aotgaudi.manifest/2", note=1),
            "schema: is 'aotgaudi.manifest/2' (should be 'aotgaudi.manifest/1')",
        ),
        (edited(note=1), "note: unknown key (known here: entries, id, schema, spec)"),
        (edited(spec={}), "spec.schema: is missing"),
        (edited(entries={}), "entries.prompt: is missing"),
        (with_row("prompt", [1, 48, 0]), "the content hashes to"),
        (with_row("prompt", [1, 16, 0]), "entries: an entry occurs twice"),
        (with_row("prompt", [1, 16.5, 0]), "entries.prompt.rows.10.1: is 16.5"),
        (with_row("prompt", [1, True, 0]), "entries.prompt.rows.10.1: is True"),
        (with_row("prompt", [0, 16, 0]), "entries.prompt.rows.10.0: is 0"),
        (with_row("prompt", [1, 16]), "entries.prompt.rows.10.2: is missing"),
        (with_row("sampler", [1, 0.0, 1.0, 0, 1]), "entries.sampler.rows.24.4: is 1"),
        (DATA.replace(b'"query_len"', b'"length"', 1), "entries.prompt.columns.1: is 'length'"),
        (DATA.replace(b'"max_num_seqs": 2', b'"max_num_seqs": 3'), "the content hashes to"),
        (DATA.replace(b'"num_blocks": 24', b'"num_blocks": 2'), "spec.limits.num_blocks: is 2, too few"),
        (DATA.replace(b"1e-05", b"1e999"), "spec.model.config: "),
        (DATA.replace(b'"threshold": 32', b'"threshold": NaN'), "spec.defrag.threshold: is nan"),
    ],
)
def test_anything_else_is_refused_with_its_place(data: bytes, expected: str) -> None:
    with pytest.raises(ManifestError) as caught:
        loads(data)

    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(position: int, byte: int) -> None:
    damaged = DATA[:position] + bytes([byte]) + DATA[position + 1 :]
    with contextlib.suppress(ManifestError):
        assert loads(damaged) == MANIFEST


@given(st.binary(max_size=200))
def test_no_bytes_give_anything_but_a_manifest_error(data: bytes) -> None:
    with pytest.raises(ManifestError):
        loads(data)


def test_files_are_written_and_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.manifest.json"
    write_manifest(path, MANIFEST)
    assert path.read_bytes() == DATA
    assert read_manifest(path) == MANIFEST

    path.write_bytes(b"{}")
    with pytest.raises(ManifestError, match=r"x\.manifest\.json: schema: is missing"):
        read_manifest(path)
    with pytest.raises(ManifestError, match=r"absent\.json: cannot be read: No such file"):
        read_manifest(tmp_path / "absent.json")


def test_entries_must_be_grouped_by_kind_and_distinct() -> None:
    with pytest.raises(ValueError, match="grouped"):
        Manifest(SPEC, (DecodeEntry(1, 1, 1), PromptEntry(1, 16, 0)))
    with pytest.raises(ValueError, match="twice"):
        Manifest(SPEC, (PromptEntry(1, 16, 0), PromptEntry(1, 16, 0)))


def test_file_columns_are_the_entries_fields() -> None:
    """The file's types are written out; this holds them to the entry classes."""
    tables = EntryTables.model_fields
    assert list(tables) == list(ENTRY_KINDS)
    content = MANIFEST.content()["entries"]
    assert {kind: tuple(table["columns"]) for kind, table in content.items()} == {
        kind: cls.columns() for kind, cls in ENTRY_KINDS.items()
    }


@pytest.mark.parametrize("name", schema_files())
def test_committed_json_schema_is_up_to_date(name: str) -> None:
    """Mend with ``python -m aotgaudi.manifest.schema docs``."""
    assert (DOCS / name).read_bytes() == schema_files()[name]
