"""The statement: an in-toto Statement v1, canonical, and a function of the bundle alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from aotgaudi.bundle.signature import Statement, load_statement
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import ManifestError

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed


def statement_of(sealed: Sealed) -> Statement:
    bundle = sealed.open()
    return Statement.of(bundle.index_bytes, bundle.index, bundle.receipt)


def test_the_fields(sealed: Sealed) -> None:
    bundle = sealed.open()

    document = json.loads(statement_of(sealed).dumps())

    assert document == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "aotgaudi.bundle.json", "digest": {"sha256": sha256_bytes(bundle.index_bytes)}}],
        "predicateType": "https://github.com/aotgaudi/aotgaudi/bundle/v1",
        "predicate": {
            "manifest_id": sealed.manifest_id,
            "manifest": str(bundle.index.manifest),
            "receipt": str(bundle.index.receipt),
            "target": json.loads(sealed.receipt.target.model_dump_json()),
            "builder": {"aotgaudi": "1"},
            "counts": bundle.index.counts.model_dump(),
            "epoch": 0,
        },
    }


def test_round_trip(sealed: Sealed) -> None:
    statement = statement_of(sealed)

    assert load_statement(statement.dumps()) == statement
    assert statement.index_sha256 == sha256_bytes(sealed.open().index_bytes)


def edited(sealed: Sealed, **changes: Any) -> bytes:
    return canonical_json({**json.loads(statement_of(sealed).dumps()), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_type": "https://in-toto.io/Statement/v0.1"}, "_type"),
        ({"predicateType": "https://slsa.dev/provenance/v1"}, "predicateType"),
        ({"subject": []}, "subject"),
        ({"subject": [{"name": "other", "digest": {"sha256": "0" * 64}}]}, "subject.0.name"),
        (
            {"subject": [{"name": "aotgaudi.bundle.json", "digest": {"sha512": "0"}}]},
            "subject.0.digest.sha256",
        ),
        ({"predicate": {}}, "predicate.manifest_id"),
        ({"extra": 1}, "extra"),
    ],
)
def test_another_statement_is_refused_with_the_place(
    sealed: Sealed, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=f"signed statement: {message}"):
        load_statement(edited(sealed, **changes))


def test_a_statement_for_another_epoch_is_refused(sealed: Sealed) -> None:
    document = json.loads(statement_of(sealed).dumps())
    document["predicate"]["epoch"] = 1

    with pytest.raises(ManifestError, match=r"signed statement: predicate\.epoch: Input should be 0"):
        load_statement(canonical_json(document))


def test_another_form_of_the_same_json_is_refused(sealed: Sealed) -> None:
    with pytest.raises(ManifestError, match="not in canonical form"):
        load_statement(json.dumps(json.loads(statement_of(sealed).dumps())).encode())
