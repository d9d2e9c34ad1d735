"""The grammar of the bridge's cache setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.gaudi.cache_setting import CacheSetting, sealed_setting


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("", CacheSetting(None)),
        ("/c", CacheSetting(Path("/c"), limit_mib=1024)),
        ("/c,True,8192", CacheSetting(Path("/c"), delete_at_start=True, limit_mib=8192)),
        ("/c,,", CacheSetting(Path("/c"))),
        ("/c,1,5,TRUE", CacheSetting(Path("/c"), limit_mib=0, is_shared=True)),
        ("/c,false,0,false", CacheSetting(Path("/c"), limit_mib=0)),
    ],
)
def test_fields_are_read_as_the_bridge_reads_them(text: str, setting: CacheSetting) -> None:
    assert CacheSetting.parse(text) == setting


@pytest.mark.parametrize("text", ["/c,false,0,false,x", "/c,maybe", "/c,false,-1", "/c,false,1GB", "/c,,,x"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="PT_HPU_RECIPE_CACHE_CONFIG"):
        CacheSetting.parse(text)


@given(
    st.text(st.characters(exclude_characters=",\0", codec="utf-8"), min_size=1).map(
        lambda text: Path("/") / text
    )
)
def test_what_we_write_has_three_fields_and_keeps_everything(directory: Path) -> None:
    text = sealed_setting(directory)

    assert text.count(",") == 2
    assert CacheSetting.parse(text) == CacheSetting(directory, limit_mib=0)


def test_a_comma_would_end_the_directory() -> None:
    with pytest.raises(SpecError, match="comma"):
        sealed_setting(Path("/a,b"))
