from __future__ import annotations

import hashlib
import math

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from aotgaudi.digest import canonical_json, canonical_row, sha256_pieces

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(st.lists(SCALARS))
@example([1.0, -0.0, 1e-5, 1e-7, 1e16, 1e21, 5e-324, 2.0**53, 0.1, True, 1, "1"])
@example(["\u2028", "\x00\x1f\x7f", '"\\/', "\b\t\n\f\r", "\u0131", "😀"])
def test_a_row_is_written_as_the_rfc_has_it(row: list[int | float | bool | str]) -> None:
    assert canonical_row(row).encode() == rfc8785.dumps(row) == canonical_json(row)


@pytest.mark.parametrize("value", [2**53, -(2**53), math.inf, -math.inf, math.nan, "\ud800"])
def test_a_row_refuses_what_the_rfc_cannot_hold(value: float | str) -> None:
    for write in (canonical_row, rfc8785.dumps):
        with pytest.raises(ValueError):  # noqa: PT011 - of three kinds, with the words of the library
            write([value])


@given(st.lists(st.binary()))
def test_the_digest_of_pieces_is_that_of_the_whole(pieces: list[bytes]) -> None:
    assert sha256_pieces(pieces) == hashlib.sha256(b"".join(pieces)).hexdigest()
