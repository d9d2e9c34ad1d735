"""Properties of what a command is described as, over many flags and variables: the interpreter is asked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aotgaudi.bundle.launch import Launch, load_launch
from aotgaudi.commands.flags import CONDITIONS, FLAGS, NEUTRAL_FLAGS, NEUTRAL_VARIABLES
from aotgaudi.commands.variables import is_secret
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.vllm import ACTED_ON, VLLM
from aotgaudi.wrap.launch import Found, describe
from aotgaudi.wrap.launch_comparison import compare
from tests.guests_here import vllm_here

pytestmark = pytest.mark.process

RULES = VLLM.variable_rules
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda text: not text.startswith(("-", "{", "["))
)
CHECKED = {"model", "port", "api-server-count", "ssl-keyfile", "ssl-certfile"}
SOME_FLAGS = st.sampled_from(
    sorted(n for n in NEUTRAL_FLAGS if FLAGS[n].arity == "value" and n not in CHECKED)
)
SOME_VARIABLES = st.sampled_from(
    sorted(
        [
            *NEUTRAL_VARIABLES,
            *CONDITIONS,
            "HOME",
            "USER",
            "PWD",
            "TMPDIR",
            "HOSTNAME",
            "HF_TOKEN",
            "VLLM_API_KEY",
        ]
    )
).filter(lambda name: "*" not in name)
UNKNOWN_FLAGS = st.from_regex(r"[a-z]{2,6}(-[a-z]{1,6}){0,2}", fullmatch=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    here = vllm_here(tmp_path_factory.mktemp("here"))
    return here.find("vllm", "serve", here.model(), "--max-model-len", "512")


@pytest.fixture(scope="module")
def sealed(found: Found) -> Launch:
    return launched(found)


def launched(found: Found, *words: str, environ: Mapping[str, str] | None = None, at: str = "/r") -> Launch:
    """The launch with more words and variables."""
    whole = (*found.words, *words)
    more = {**found.environ, **(environ or {})}
    flags = found.adapter.read(whole[2:], more)
    return describe(dataclasses.replace(found, words=whole, flags=flags, environ=more), root=at, asked="none")


@given(
    flags=st.dictionaries(SOME_FLAGS, TEXTS, max_size=3),
    environ=st.dictionaries(SOME_VARIABLES, TEXTS, max_size=3),
    root=TEXTS,
)
def test_what_changes_no_code_never_makes_another_launch(
    found: Found, sealed: Launch, flags: dict[str, str], environ: dict[str, str], root: str
) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]

    here = launched(found, *words, environ=environ, at=root)

    assert here.id == launched(found).id
    assert compare(launched(found), here, RULES).components == ()
    assert load_launch(here.dumps()) == here


@given(name=UNKNOWN_FLAGS, value=st.none() | TEXTS)
def test_a_flag_that_nobody_knew_of_always_makes_another_launch(
    found: Found, sealed: Launch, name: str, value: str | None
) -> None:
    assume(name not in FLAGS and name.removeprefix("no-") not in FLAGS and not is_secret(name))
    words = (f"--{name}",) if value is None else (f"--{name}", value)
    try:
        here = launched(found, *words)
    except SpecError:
        assert any(flag.startswith(name) for flag in ACTED_ON)
        return

    assert here.id != sealed.id
    assert [one.name for one in compare(sealed, here, RULES).components] == [f"flag.{name}"]


@given(name=st.from_regex(r"VLLM_[A-Z]{3,10}_[A-Z]{3,10}", fullmatch=True), value=TEXTS)
def test_a_variable_that_nobody_knew_of_always_makes_another_launch(
    found: Found, sealed: Launch, name: str, value: str
) -> None:
    assume(RULES.reason(name) is None)

    assert launched(found, environ={name: value}).id != sealed.id


def test_bytes_that_are_no_text_are_kept_as_escapes_or_refused(found: Found) -> None:
    launch = launched(found, environ={"VLLM_X": "a\udcff", "VLLM_IMAGE_TAG": "\udcfe"})

    assert load_launch(launch.dumps()) == launch
    assert launch.variables["VLLM_X"] == "a\\xff"


def test_a_model_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = vllm_here(tmp_path)
    model = here.model()

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    found = here.find("vllm", "serve", model)
    monkeypatch.setattr(Path, "iterdir", refuse)

    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        launched(found)
