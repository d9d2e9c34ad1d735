"""Documents: digests that are values here and text in the file, and one form only."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field

from aotgaudi.digest import Digest
from aotgaudi.document import DigestField, Document, ForeignValue, load_document
from aotgaudi.errors import ManifestError

DIGEST = Digest("ab" * 32, 7)


class Sample(Document):
    schema_: Literal["sample/1"] = Field(default="sample/1", alias="schema")
    digest: DigestField
    others: dict[str, DigestField] = Field(default_factory=dict)


GOLDEN = b'{"digest":"sha256:%b:7","others":{"b":"sha256:%b:7"},"schema":"sample/1"}' % ((b"ab" * 32,) * 2)


def test_a_digest_is_a_value_here_and_text_in_the_file() -> None:
    sample = Sample(digest=DIGEST, others={"b": DIGEST})

    assert sample.dumps() == GOLDEN
    assert load_document(GOLDEN, Sample, "sample") == sample
    assert load_document(GOLDEN, Sample, "sample").others["b"] == DIGEST


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'7",', b'07",', "sample: digest: not a digest in canonical form"),
        (b'"sha256:', b'"sha1:', "sample: digest: not a digest: 'sha1:"),
        (b'{"b":', b'{"b":1,"c":', r"sample: others\.b: Input should be a valid string"),
        (b'{"b":', b'{ "b":', "sample is not in canonical form"),
        (b"sample/1", b"sample/2", "sample has schema 'sample/2'; this aotgaudi reads 'sample/1'"),
        (b"}", b"", "sample is not JSON"),
    ],
)
def test_another_form_is_refused_with_its_place(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        load_document(GOLDEN.replace(old, new, 1), Sample, "sample")


def test_a_format_of_others_may_have_keys_that_we_do_not_know() -> None:
    class Theirs(ForeignValue):
        known: int

    assert Theirs.model_validate_json(b'{"known": 1, "new": 2}') == Theirs(known=1)
