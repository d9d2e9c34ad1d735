"""What a signature of a bundle says: an in-toto Statement v1 (in-toto/attestation, spec/v1/statement.md).

The payload of the envelope (envelope.py) is the canonical JSON (RFC 8785) of::

    {"_type":         "https://in-toto.io/Statement/v1",
     "subject":       [{"name": "aotgaudi.bundle.json", "digest": {"sha256": of the index's bytes}}],
     "predicateType": "https://github.com/aotgaudi/aotgaudi/bundle/v1",
     "predicate":     {"manifest_id": the manifest's id,
                       "manifest":    digest of manifest.json,
                       "receipt":     digest of receipt.json,
                       "target":      the receipt's target,
                       "builder":     the receipt's builder,
                       "counts":      the index's counts,
                       "epoch":       int}}

Versions of the predicate: v1 (first).

Everything but the epoch follows from the bundle, so that the same bundle, epoch and key give the same bytes. An
epoch is a number that who signs may raise, so that older bundles can be refused (``--minimum-epoch``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from aotgaudi.backends.base import Target
from aotgaudi.bundle.format import INDEX_NAME, BundleIndex, Counts
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.digest import sha256_bytes
from aotgaudi.document import DigestText, Document, Value, load_document

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["https://github.com/aotgaudi/aotgaudi/bundle/v1"] = (
    "https://github.com/aotgaudi/aotgaudi/bundle/v1"
)

Epoch = Annotated[int, Field(ge=0, lt=1 << 53)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]


class SubjectDigest(Value):
    """The sha256 of the index's bytes, 64 hex digits."""

    sha256: _Sha256


class Subject(Value):
    """The file that is signed for: the index, which names everything else."""

    name: Literal["aotgaudi.bundle.json"] = INDEX_NAME
    digest: SubjectDigest


class Predicate(Value):
    """What the signed bundle is; see the module."""

    manifest_id: str
    manifest: DigestText
    receipt: DigestText
    target: Target
    builder: dict[str, str]
    counts: Counts
    epoch: Epoch


class Statement(Document):
    """See the module."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT_TYPE, alias="_type")
    subject: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=1)]
    predicate_type: Literal["https://github.com/aotgaudi/aotgaudi/bundle/v1"] = Field(
        default=PREDICATE_TYPE, alias="predicateType"
    )
    predicate: Predicate

    @classmethod
    def of(cls, index_bytes: bytes, index: BundleIndex, receipt: Receipt, epoch: int) -> Statement:
        """Returns what is signed of the bundle with these documents."""
        return cls(
            subject=(Subject(digest=SubjectDigest(sha256=sha256_bytes(index_bytes))),),
            predicate=Predicate(
                manifest_id=index.manifest_id,
                manifest=index.manifest,
                receipt=index.receipt,
                target=receipt.target,
                builder=receipt.builder,
                counts=index.counts,
                epoch=epoch,
            ),
        )

    @property
    def index_sha256(self) -> str:
        """The sha256 of the index that is signed for, 64 hex digits."""
        return self.subject[0].digest.sha256

    @property
    def epoch(self) -> int:
        """The number below which ``--minimum-epoch`` refuses."""
        return self.predicate.epoch


def dump_statement(statement: Statement) -> bytes:
    """Returns the canonical bytes of a statement."""
    return statement.dumps()


def load_statement(data: bytes) -> Statement:
    """Parses the canonical bytes of a statement. Raises ManifestError, which names the place."""
    return load_document(data, Statement, "signed statement")
