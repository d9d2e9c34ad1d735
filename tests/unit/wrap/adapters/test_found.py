from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.launch import GuestName
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.wrap.launch import server_kind
from aotgaudi.wrap.launch_machine import installed_of
from aotgaudi.wrap.starts import SERVERS, begin
from tests.guests_here import Here

pytestmark = pytest.mark.process

SERVER = "vllm.entrypoints.openai.api_server"


def test_every_server_has_a_name_a_row_and_a_value() -> None:
    assert set(get_args(GuestName)) == SERVERS.keys()
    assert [server_kind(name).name for name in get_args(GuestName)] == [*get_args(GuestName)]


def test_the_fake_server_is_not_offered() -> None:
    with pytest.raises(SpecError, match=r"one of sglang, vllm, vllm-gaudi\)$"):
        server_kind("vlm")  # type: ignore[arg-type]


def test_a_console_script_names_its_interpreter(here: Here) -> None:
    found = here.find("vllm", "serve", here.model(), "--port", "81")

    assert found.adapter.name == "vllm"
    assert found.interpreter == sys.executable
    assert found.flags.address.port == 81
    assert found.model == here.folder / "tiny"


@pytest.mark.parametrize(
    "first_line",
    [
        f"#!{sys.executable} -s",
        "#!/usr/bin/env python3",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''",
    ],
)
def test_first_lines_are_read_in_each_form(here: Here, first_line: str) -> None:
    here.script(first_line=first_line)

    assert Path(here.find("vllm", "serve", here.model()).interpreter).exists()


@pytest.mark.parametrize(
    "head",
    [
        ("numactl", "-N", "0", sys.executable, "-u", "-m", SERVER, "--model"),
        ("env", "A=b", sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
        (sys.executable, "bin/vllm", "serve"),
        ("nice", "bin/vllm", "serve"),
    ],
)
def test_what_sets_something_up_may_stand_in_front(here: Here, head: tuple[str, ...]) -> None:
    assert here.find(*head, here.model()).interpreter == sys.executable


@pytest.mark.parametrize(
    ("kept", "environ"),
    [
        (("sh", "-c", "exec vllm serve tiny --max-num-seqs 8"), {}),
        (
            ("bash", "-lc", "export VLLM_USE_AOT_COMPILE=0\nvllm serve tiny --max-num-seqs 8"),
            {"VLLM_USE_AOT_COMPILE": "0"},
        ),
        (("vllm", "serve", "tiny", "--config", "serve.yaml"), {}),
        (
            ("docker", "run", "-eVLLM_USE_AOT_COMPILE=0", "vllm/x", "tiny", "--max-num-seqs=8"),
            {"VLLM_USE_AOT_COMPILE": "0"},
        ),
        (("docker", "run", "x", "sh", "-c", "vllm serve --config serve.yaml tiny"), {}),
        (
            (
                "podman",
                "run",
                f"--entrypoint={sys.executable}",
                "x",
                "-m",
                SERVER,
                "--model",
                "tiny",
                "--max-num-seqs=8",
            ),
            {},
        ),
    ],
)
def test_a_kept_command_is_the_launch_of_the_plain_one(
    here: Here, kept: tuple[str, ...], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here.model()
    (here.folder / "serve.yaml").write_text("max-num-seqs: 8\nmodel: tiny\n")
    plain = ("vllm", "serve", "tiny", "--max-num-seqs", "8")

    found = here.find(*kept)

    assert here.launch(*kept).id == here.launch(*plain, **environ).id
    assert found.words[found.words[0] != "vllm" :][:2] in (("vllm", "serve"), ("-m", SERVER))
    assert found.notes[-1].startswith("read as ")
    with begin(kept, here.environ, here.folder) or pytest.fail("was not asked") as asking:
        assert here.find(*kept).installed == installed_of(asking)


def test_assignments_in_front_count_as_variables(here: Here) -> None:
    words = ("env", "VLLM_USE_AOT_COMPILE=0", "vllm", "serve", here.model())

    assert here.launch(*words).variables["VLLM_USE_AOT_COMPILE"] == "0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the command: is empty"),
        (("ls",), "starts no server that is known"),
        (("bash", "-c", "vllm serve tiny; x"), "the script of bash: has ';', which a shell would read"),
        (("bash", "-c", "ls"), "'ls' starts no server that is known"),
        (("bash", "vllm", "serve", "tiny"), "begins with 'bash vllm': a script is not read"),
        (("nohup", "vllm", "serve", "tiny"), "begins with 'nohup', which may start something else"),
        (("docker", "exec", "x", "vllm", "serve", "tiny"), "begins with 'docker exec', which is not read"),
        (("vllm", "serve"), "names no model"),
        (("vllm", "serve", "tiny", "other"), "has 'other' beside the model 'tiny'"),
        (("vllm", "serve", "tiny", "--model", "other"), "has 'other' beside the model 'tiny'"),
        (("vllm", "serve", "--model=tiny", "--model", "other"), "has 'other' beside the model 'tiny'"),
        ((sys.executable, "-m", SERVER, "tiny"), "names no model"),
        ((sys.executable, "-m", SERVER, "tiny", "--model", "other"), "has 'other' beside the model 'tiny'"),
        (("vllm", "serve", "/no/such"), "there is no directory '/no/such'"),
        (("vllm", "serve", "org/name"), "fetch it first: hf download org/name"),
        (("vllm", "serve", "tiny/config.json"), "is the file 'tiny/config.json'"),
        (("-m", SERVER, "--model", "tiny"), "begins with|names no interpreter"),
        (("/no/such/vllm", "serve", "tiny"), "is no program on this machine"),
        (("vllm", "serve", "tiny", "--nnodes", "2"), "--nnodes: is more than 1"),
        (("vllm", "serve", "tiny", "--headless"), "--headless: cannot be wrapped"),
        (
            ("vllm", "serve", "tiny", "--distributed-executor-backend", "ray"),
            "Ray's processes cannot be watched",
        ),
        (("vllm", "serve", "tiny", "-dpb", "ray"), "--data-parallel-backend: is ray"),
        (("vllm", "serve", "tiny", "-dp", "4", "-dpl", "2"), "--data-parallel-size-local: is 2"),
        (("vllm", "serve", "tiny", "-dp", "4", "-dpl", "0"), "--data-parallel-size-local: is 0"),
        (("vllm", "serve", "tiny", "-dp", "2", "-dpn", "0"), "--data-parallel-rank: cannot be wrapped"),
        (("vllm", "serve", "tiny", "-dp", "2", "-dpr", "0"), "--data-parallel-start-rank: cannot be wrapped"),
        (("vllm", "serve", "tiny", "-dp", "2", "-dph"), "--data-parallel-hybrid-lb: cannot be wrapped"),
        (("vllm", "serve", "tiny", "-dp", "2", "-dpe"), "--data-parallel-external-lb: cannot be wrapped"),
        (
            ("vllm", "serve", "tiny", "-dp", "2", "--data-parallel-multi-port-external-lb"),
            "--data-parallel-multi-port-external-lb: cannot be wrapped",
        ),
        (("vllm", "serve", "tiny", "--enable-elastic-ep"), "--enable-elastic-ep: cannot be wrapped"),
        (("vllm", "serve", "tiny", "-asc", "0"), "--api-server-count: is '0'"),
        (("vllm", "serve", "tiny", "--ssl-cert-reqs", "2"), "no certificate of a client"),
        (("vllm", "serve", "tiny", "--config", "x.yaml"), "x.yaml: cannot be read"),
        (("vllm", "serve", "tiny", "--x", "\udcff"), "which is not UTF-8"),
        (("env", "-i", "vllm", "serve", "tiny"), "options of env"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_the_reason(
    here: Here, words: tuple[str, ...], message: str
) -> None:
    here.model()

    with pytest.raises(SpecError, match=message) as caught:
        here.find(*words)

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ("-dp", "2"),
        ("-dp", "2", "-dpl", "2", "-dpb", "mp", "--no-data-parallel-hybrid-lb"),
        ("--api-server-count", "3"),
        ("--ssl-certfile", "x", "--ssl-keyfile", "y", "--ssl-ca-certs", "z", "--ssl-cert-reqs", "1"),
        ("--kv-transfer-config", '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}'),
    ],
    ids=" ".join,
)
def test_what_can_be_watched_whole_is_wrapped(here: Here, words: tuple[str, ...]) -> None:
    assert here.find("vllm", "serve", here.model(), *words).adapter.name == "vllm"


def test_ranks_that_somebody_else_starts_are_refused_unless_vllm_ignores_the_variable(here: Here) -> None:
    words = ("vllm", "serve", here.model())

    with pytest.raises(SpecError, match="VLLM_DP_SIZE: is '2'"):
        here.find(*words, VLLM_DP_SIZE="2", VLLM_DP_RANK="1")

    for more, size in (((), "1"), (("-dp", "2"), "4")):
        assert here.find(*words, *more, VLLM_DP_SIZE=size).flags.address.ranks == (2 if more else 1)


@pytest.mark.parametrize("name", ["VLLM_DISABLE_COMPILE_CACHE", "VLLM_USE_RUST_FRONTEND"])
def test_variables_that_leave_nothing_to_capture_or_to_watch_are_refused(here: Here, name: str) -> None:
    with pytest.raises(SpecError, match=name):
        here.find("vllm", "serve", here.model(), **{name: "1"})


def test_a_script_that_is_not_pythons_is_refused(here: Here) -> None:
    here.script(first_line="#!/bin/bash")

    with pytest.raises(SpecError, match="which is no Python"):
        here.find("vllm", "serve", here.model())


def test_an_interpreter_that_fails_is_said_to(here: Here) -> None:
    broken = here.folder / "bin" / "python"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    broken.chmod(0o755)

    with pytest.raises(TargetError, match=r"bin/python fails: it is broken"):
        here.find(broken, "-m", SERVER, "--model", here.model())


@pytest.mark.parametrize("is_checkout", [False, True])
def test_a_python_without_the_server_is_refused_by_name_before_anything_starts(
    here: Here, *, is_checkout: bool
) -> None:
    for info in here.site.glob("*.dist-info"):
        shutil.rmtree(info)
    words = ("vllm", "serve", here.model())
    if is_checkout:  # On PYTHONPATH, without metadata.
        (here.site / "vllm").mkdir()
        (here.site / "vllm" / "__init__.py").touch()
        assert here.find(*words).adapter.name == "vllm"
        return

    with pytest.raises(SpecError, match=f"{re.escape(sys.executable)} has no vllm"):
        here.find(*words)


def test_a_name_on_the_hub_is_looked_up_in_the_local_cache(here: Here) -> None:
    repository = here.folder / "hub" / "models--org--name"
    model = here.model("hub/models--org--name/snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")

    found = here.find("vllm", "serve", "org/name", HF_HUB_CACHE=str(here.folder / "hub"))

    assert found.model == model
    assert here.launch("vllm", "serve", "org/name", HF_HUB_CACHE=str(here.folder / "hub")).id == (
        here.launch("vllm", "serve", model).id
    )


def test_the_fake_guest_is_found_only_where_it_is_asked_for(here: Here) -> None:
    script = here.script("fake_server.py")
    words = (sys.executable, script, "serve", here.model())

    with pytest.raises(SpecError, match="starts no server that is known"):
        here.find(*words)
    assert here.find(*words, AOTGAUDI_FAKE_GUEST="1").adapter.name == "fake"


@pytest.mark.parametrize("chosen", [(), ("--served-model-name", "chat")])
def test_the_command_to_run_names_the_alias_and_serves_the_name_of_the_user(
    here: Here, chosen: tuple[str, ...]
) -> None:
    model = str(here.model())
    found = here.find("vllm", "serve", model, "--port", "81", *chosen)

    run = found.adapter.command(found.words, found.flags, Path("/run/x"), is_aliased=True)

    served = chosen or ("--served-model-name", model)
    assert run == ("vllm", "serve", "/run/x/model", "--port", "81", *served)


def test_a_key_of_the_api_is_there_for_whoever_asks_and_shown_nowhere(here: Here) -> None:
    found = here.find("vllm", "serve", here.model(), "--api-key", "sesame")

    assert found.flags.address.authorization == "Bearer sesame"
    assert "sesame" not in repr(found.flags)
    assert (
        here.find("vllm", "serve", here.model(), VLLM_API_KEY="x").flags.address.authorization == "Bearer x"
    )


COMMAND_WORDS = f"vllm serve tiny -m {SERVER} python env A=b --model -tp --port {{ --x= -".split()


@given(words=st.lists(st.sampled_from(COMMAND_WORDS) | st.text(max_size=5), max_size=8))
def test_any_words_are_a_server_or_refused_in_a_line(words: list[str]) -> None:
    family = server_kind("vllm")
    at = family.starts_at(words)
    if at is None:
        return
    refusals = []
    try:
        flags = family.read(words[at[1] :], {})
        family.require_witnessed(flags, {})
        family.command(words, flags, Path("/r"), is_aliased=True)
    except SpecError as error:
        refusals.append(str(error))

    assert not any("\n" in refusal for refusal in refusals)
