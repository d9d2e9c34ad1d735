"""Commands in the forms in which people keep them: each is read as the plain command is, or refused in a sentence."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.commands.container_files import read_compose, read_pod
from aotgaudi.commands.starts import ENGINES
from aotgaudi.errors import SpecError
from aotgaudi.wrap.starts import plain_command
from tests.command import Command
from tests.environment import ROOT

DATA = Path(__file__).parent / "data/kept_commands.yaml"
CASES = yaml.safe_load(DATA.read_text(encoding="utf-8"))
PLAIN = "vllm serve /models/tiny --max-num-seqs 4 --max-num-batched-tokens 128 --max-model-len 256"
CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 100, "torch_dtype": "bfloat16"}

build = Command("build", "manifest", "--num-blocks", "64", "-o", "m.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def written(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.replace("HERE", str(folder)), encoding="utf-8")


def options_of(case: Mapping[str, Any], folder: Path) -> list[str]:
    form = next(form for form in ("text", "pod", "compose") if form in case)
    named = ["--container", case["name"]] if "name" in case else []
    if form == "text":
        return ["--from-vllm", case["text"]]
    written(folder, {f"{form}.yaml": case[form]})
    return [f"--from-vllm-{form}", f"{form}.yaml", *named]


def test_there_are_many_in_each_form() -> None:
    assert len(CASES) >= 40
    assert {word for case in CASES for word in case.get("text", "").split()} >= ENGINES


@pytest.mark.parametrize("case", CASES, ids=[case["case"].replace(" ", "_") for case in CASES])
def test_each_is_read_as_the_plain_command_is(
    case: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, case.get("files", {}))
    variables = "".join(f"{name}={value}\n" for name, value in case.get("environment", {}).items())
    written(folder, {"plain.env": variables})
    config = ["--model-config", "tiny/config.json"]
    plain = f"{PLAIN} {case.get('flags', '')}"
    expected = build.document("--from-vllm", plain, "--env-file", "plain.env", *config)["id"]
    for name, value in case.get("caller", {}).items():
        monkeypatch.setenv(name, value)

    found = build.document(*options_of(case, folder), *([] if case.get("is_mounted") else config))["id"]

    assert found == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("docker exec x vllm serve m", "the command: begins with 'docker exec', which is not read"),
        ("docker compose up", "begins with 'docker compose', which is not read"),
        ("docker run", "docker run names no image"),
        ("docker run --rm -it", "docker run names no image"),
        ("docker run --gpu all vllm/x m", "--gpu is no option of docker run that is known"),
        ("docker run -itz vllm/x m", "-itz is no option of docker run that is known"),
        ("docker --frob run vllm/x m", "begins with 'docker --frob', which is not read"),
        ("docker run -e", "-e of docker run has no value"),
        ("docker run --env-file none.env vllm/x m", "none.env: cannot be read"),
        (
            "docker run ubuntu",
            "the entrypoint of the image 'ubuntu' is not known (give its entrypoint, or the command)",
        ),
        ("docker run ubuntu /models/tiny", "the entrypoint of the image 'ubuntu' is not known"),
        ("docker run vllm/x", "names no model"),
        ("docker run $OPTIONS vllm/x m", "has '$OPTIONS', which a shell would expand"),
        ("docker run -e VLLM_SKIP_WARMUP=$W vllm/x m", "has '$W', which a shell would expand"),
        ("docker run -w $W vllm/x m", "has '$W', which a shell would expand"),
        ("docker run vllm/x $MODEL", "has '$MODEL', which a shell would expand"),
        ("VLLM_A=$B sh -c 'vllm serve m'", "has '$B', which a shell would expand"),
        ("sh -c 'VLLM_A=$B vllm serve m'", "has '$B', which a shell would expand"),
        ("docker run x sh -c 'vllm serve $MODEL'", "has '$MODEL', which a shell would expand"),
        (
            "docker run x sh -c 'vllm serve m | tee log'",
            "the script of sh: has '|', which a shell would read",
        ),
        ("nohup docker run vllm/x vllm serve m", "begins with 'nohup', which may start something else"),
        ("sh serve.sh", "begins with 'sh serve.sh': a script is not read"),
        ("bash", "begins with 'bash': a script is not read"),
        ("bash --rcfile x -c 'vllm serve m'", "begins with 'bash --rcfile': a script is not read"),
        ("sh -c", "begins with 'sh -c': a script is not read"),
        ("sh -c ''", "the vLLM command: is empty"),
        ("env -i sh -c 'vllm serve m'", "has options of env"),
        ("sh -c 'exec env -i vllm serve m'", "has options of env"),
        ("aotgaudi run --bundle b", "aotgaudi is given no command"),
        ("vllm serve m --config", "--config: has no value"),
        ("vllm serve m --config a.yaml --config b.yaml", "--config: is given twice"),
        ("vllm serve m --config none.yaml", "none.yaml: cannot be read: No such file or directory"),
        ("vllm serve m --config serve.toml", "serve.toml: is no file that vLLM reads as --config"),
        ("vllm serve m --config broken.yaml", "broken.yaml: is not YAML"),
        ("vllm serve m --config list.yaml", "list.yaml: is not one table of flags"),
        ("vllm serve m --config empty.yaml", "empty.yaml: is not one table of flags"),
        (
            "vllm serve m --config unknown.yaml",
            "--max-num-sqs: is a flag that is not known (did you mean --max-num-seqs?",
        ),
        ("vllm serve m --config number.yaml", "number.yaml: 3: is no flag"),
        ("vllm serve m --config date.yaml", "date.yaml: speculative-config: has no form in JSON"),
        ("vllm serve m --config large.yaml", "has 1048580 bytes, at most 1048576 are read"),
        ("vllm serve m --config latin.yaml", "latin.yaml: is not UTF-8 text"),
        (
            "vllm serve --config seqs.yaml",
            "names no model (with --config: right after serve, or in the file)",
        ),
        (
            "vllm serve --config seqs.yaml m",
            "names no model (with --config: right after serve, or in the file)",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(text: str, sentence: str, folder: Path) -> None:
    files = {
        "broken": "a: [",
        "list": "- a",
        "empty": "",
        "unknown": "max-num-sqs: 3",
        "number": "3: 4",
        "seqs": "max-num-seqs: 4",
    }
    written(folder, {f"{name}.yaml": text for name, text in files.items()})
    written(
        folder,
        {
            "date.yaml": "speculative-config: {a: 2026-01-01}",
            "large.yaml": "#" * (1 << 20) + "....",
            "serve.toml": "",
        },
    )
    (folder / "latin.yaml").write_bytes(b"a: \xff")

    assert sentence in build.refusal("--from-vllm", text)


POD = "kind: Pod\nmetadata: {{name: p}}\nspec: {{containers: [{{name: c, image: vllm/x, {}}}]}}\n"


@pytest.mark.parametrize(
    ("pod", "sentence"),
    [
        ("a: [", "pod.yaml: is not YAML"),
        ("a: !!timestamp x", "pod.yaml: is not YAML"),
        ("a: !!int ''", "pod.yaml: is not YAML"),
        ("a: 2026-99-99", "pod.yaml: is not YAML"),
        ("{[a]: b}", "pod.yaml: is not YAML"),
        ("[" * 5000, "pod.yaml: is not YAML"),
        ("kind: Service\nmetadata: {name: s}", "pod.yaml: no container starts vLLM (of none)"),
        (
            "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, image: nginx}, {name: d}]}",
            "no container starts vLLM (of p/c, p/d)",
        ),
        (
            POD.format("args: [m]") + "---\n" + POD.format("args: [n]"),
            "2 containers may start vLLM: p/c, p/c (--container NAME)",
        ),
        (POD.format("args: m"), "p/c: args: has a value of type str (a list)"),
        (POD.format("args: [m, --port, 8000]"), "p/c: args: has a value of type int"),
        (POD.format("env: {VLLM_A: x}"), "p/c: env: has a value of type dict (a list)"),
        (
            POD.format("env: [{name: VLLM_SKIP_WARMUP, value: true}]"),
            "VLLM_SKIP_WARMUP: value: has a value of type bool",
        ),
        (
            POD.format("env: [{name: VLLM_SKIP_WARMUP, valueFrom: {secretKeyRef: {name: s, key: k}}}]"),
            "VLLM_SKIP_WARMUP: has its value from secretKeyRef",
        ),
        (
            POD.format('args: ["$(M)"], env: [{name: M, valueFrom: {fieldRef: {fieldPath: x}}}]'),
            "has $(M), which has its value from fieldRef",
        ),
        (
            POD.format("args: [m], envFrom: [{configMapRef: {name: other}}]"),
            "the ConfigMap 'other' is not in the file",
        ),
        (POD.format("command: [sh, -c], args: [vllm serve m; true]"), "the script of sh: has ';'"),
        (
            POD.format("args: [m]")
            + "---\nspec: {model: {modelFormat: {name: vLLM}, args: [--max-num-seqs=9]}}",
            "has flags or variables that KServe adds to a runtime's (the pod that it makes: kubectl get pod",
        ),
        (
            "kind: Set\nmetadata: {name: s}\nspec: {roles: [{name: a, template: {spec: {containers: [&c {name: c, image:"
            " vllm/x, args: [m]}]}}}, {name: b, template: {spec: {containers: [*c]}}}]}",
            "2 containers may start vLLM: s/roles/a/c, s/roles/b/c (--container NAME)",
        ),
        (
            "args: [{{ .Values.model }}]",
            "is not YAML: while constructing a mapping (a template, as it is rendered)",
        ),
        (POD.format("command: [bash, run.sh]"), "a script is not read"),
    ],
)
def test_a_pod_that_cannot_be_read_is_refused_in_one_sentence(pod: str, sentence: str, folder: Path) -> None:
    written(folder, {"pod.yaml": pod})

    assert sentence in build.refusal("--from-vllm-pod", "pod.yaml")


@pytest.mark.parametrize(
    ("compose", "sentence"),
    [
        ("a: 1", "compose.yaml: has no services"),
        ("include: [b.yaml]\nservices: {}", "compose.yaml: has include, which is not read"),
        ("services: {a: {image: vllm/x, extends: b}}", "compose.yaml: a: has extends, which is not read"),
        (
            "services: {a: {image: vllm/x}, b: {image: vllm/x}}",
            "2 services may start vLLM: a, b (--service NAME)",
        ),
        (
            "services: {a: {image: redis}}",
            "compose.yaml: a: the entrypoint of the image 'redis' is not known",
        ),
        ("services: {a: {image: redis}, b: {image: nginx}}", "no service starts vLLM (of a, b)"),
        ("services: {a: 1}", "compose.yaml: a: has a value of type int (a table)"),
        ("services: {a: {image: vllm/x, command: '${M:?say which}'}}", "a: M is not set (say which)"),
        ("services: {a: {image: vllm/x, command: '$'}}", "which Compose cannot read"),
        ("services: {a: {image: vllm/x, command: m | tee}}", "a: command: has '|'"),
        ("services: {a: {image: vllm/x, command: '--model $M'}}", "a: M is not set (M=..., here or in .env)"),
        ("services: {a: {image: vllm/x, entrypoint: ['${M}']}}", "a: M is not set (M=..., here or in .env)"),
        (
            "services: {a: {image: vllm/x, command: m, environment: {VLLM_A: '${M}', HF_TOKEN: $N}}}",
            "a: M is not set",
        ),
        ("services: {a: {image: vllm/x, command: m, environment: [VLLM_A=$M]}}", "a: M is not set"),
        (
            "services: {a: {image: vllm/x, command: [m, --port, 80]}}",
            "a: command: has a value of type int",
        ),
        (
            "services: {a: {image: vllm/x, environment: {VLLM_A: [true]}}}",
            "a: VLLM_A: has a value of type list",
        ),
        ("services: {a: {image: vllm/x, env_file: none.env}}", "none.env: cannot be read"),
        ("services: &a {a: *a}", "compose.yaml: is not YAML: Circular reference detected"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
            ),
            "its aliases stand for too many values",
        ),
    ],
)
def test_a_service_that_cannot_be_read_is_refused_in_one_sentence(
    compose: str, sentence: str, folder: Path
) -> None:
    written(folder, {"compose.yaml": compose})

    assert sentence in build.refusal("--from-vllm-compose", "compose.yaml")


def test_a_name_that_is_not_there_and_options_that_do_not_go_together(folder: Path) -> None:
    written(folder, {"pod.yaml": POD.format("args: [m]")})

    assert "has 0 containers called 'x' (one of: p/c)" in build.refusal(
        "--from-vllm-pod", "pod.yaml", "--container", "x"
    )
    assert "cannot be read" in build.refusal("--from-vllm-pod", "none.yaml")
    for options in (
        ["--from-vllm-pod", "pod.yaml", "--from-vllm", "vllm serve m"],
        ["--from-vllm", "vllm serve m", "--container", "c"],
        ["--container", "c"],
    ):
        assert build(*options).exit_code == 2


def test_a_reference_to_a_later_variable_stays_however_often_a_pod_is_read(folder: Path) -> None:
    env = "env: [{name: A, value: $(B)}, {name: B, value: x}]"
    pod = POD.format(f"args: [m, --served-model-name, $(A)], {env}")
    written(folder, {"pod.yaml": f"{pod}---\n{POD.format('command: [vllm-router]')}"})

    assert read_pod(Path("pod.yaml"), None, {}).words[2:] == ("m", "--served-model-name", "$(B)")


def test_variables_from_elsewhere_are_given_in_a_file_of_ours(folder: Path) -> None:
    env = "{name: VLLM_CONTIGUOUS_PA, valueFrom: {secretKeyRef: {name: s, key: k}}}"
    words = json.dumps(PLAIN.split()[2:])
    pod = POD.format(f"args: {words}, env: [{env}], envFrom: [{{configMapRef: {{name: o}}}}]")
    written(folder, {"pod.yaml": pod, "ours.env": "VLLM_CONTIGUOUS_PA=true\n"})
    config = ["--model-config", "tiny/config.json"]

    found = build.document("--from-vllm-pod", "pod.yaml", "--env-file", "ours.env", *config)["id"]

    assert found == build.document("--from-vllm", PLAIN, "--env-file", "ours.env", *config)["id"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "vllm-kubernetes.yaml",
            "vllm serve /model --max-model-len=4096 --max-num-seqs=64 --shutdown-timeout=30",
        ),
        (
            "vllm-gaudi-kubernetes.yaml",
            "vllm serve /model --max-model-len=8192 --max-num-seqs=128 --shutdown-timeout=30",
        ),
        (
            "vllm-compose.yaml",
            "vllm serve /model --max-model-len=4096 --max-num-seqs=64 --shutdown-timeout=30",
        ),
    ],
)
def test_our_own_templates_are_read(template: str, words: str, folder: Path) -> None:
    written(folder, {"plain.env": ""})
    form = "--from-vllm-compose" if "compose" in template else "--from-vllm-pod"
    config = ["--model-config", "tiny/config.json", "--num-blocks", "9000"]
    longer = {**CONFIG, "max_position_embeddings": 8192}
    (folder / "tiny/config.json").write_text(json.dumps(longer), encoding="utf-8")

    found = build.document(form, ROOT / "ci/templates" / template, *config)["id"]

    assert found == build.document("--from-vllm", words, "--env-file", "plain.env", *config)["id"]


def test_a_part_of_a_sharded_capture_is_refused_by_what_its_shell_computes() -> None:
    path = ROOT / "ci/templates/vllm-capture-jobs.yaml"

    assert "has '$(', which a shell would expand" in build.refusal(
        "--from-vllm-pod", path, "--container", "shard"
    )


def test_no_secret_is_printed(folder: Path) -> None:
    words = f"{PLAIN.removeprefix('vllm serve ')} --api-key sesame"
    text = f"docker run -e HF_TOKEN=sesame -e VLLM_API_KEY=sesame vllm/x {words}"

    result = build("--from-vllm", text, "--model-config", "tiny/config.json")

    assert (result.exit_code, "read as vllm serve /models/tiny" in result.stderr) == (0, True), result.output
    assert "sesame" not in result.output


@pytest.mark.process
@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker")
def test_every_option_of_docker_is_known(folder: Path) -> None:
    said = subprocess.run(["docker", "run", "--help"], capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"(?m)^ +(?:(-\w), +)?--([\w-]+) (\w*)", said)
    rows = [row for row in rows if row[1] not in ("entrypoint", "env-file")]
    assert len(rows) > 90
    for short, name, kind in rows:
        for written_as in filter(None, (short, f"--{name}")):
            words = ["docker", "run", written_as, *(["A=1"] if kind else []), "vllm/x", "m"]
            assert plain_command(words, {}, folder).words == ("vllm", "serve", "m"), words


@pytest.mark.parametrize(
    "kept",
    [
        ("sh", "-c", "exec python3 -m sglang.launch_server --model-path m --api-key k"),
        (
            "docker",
            "run",
            "--gpus",
            "all",
            "lmsysorg/sglang",
            "python3",
            "-m",
            "sglang.launch_server",
            "--model-path",
            "m",
            "--api-key=k",
        ),
    ],
)
def test_commands_of_other_servers_are_read_too(kept: tuple[str, ...], folder: Path) -> None:
    found = plain_command(kept, {}, folder)

    assert found.words[:5] == ("python3", "-m", "sglang.launch_server", "--model-path", "m")
    assert found.notes == ("read as python3 -m sglang.launch_server --model-path m",)


ODD: tuple[Any, ...] = (
    None,
    1,
    2.5,
    True,
    "x",
    "$(A)",
    "${A",
    "$",
    "",
    [],
    {},
    [1],
    ["a"],
    {"a": 1},
    {1: 2},
    [{"name": 1}],
    [[["a"]]],
)
DEPLOYED = [case for case in CASES if "text" not in case]


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every table and list of a document, with each of its keys."""
    for key in (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from places_of(value[key])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.sampled_from(DEPLOYED), odd=st.sampled_from(ODD), where=st.integers(0, 10**6))
def test_whatever_stands_in_a_file_is_read_or_refused_in_a_line(
    case: Mapping[str, Any], odd: Any, where: int, folder: Path
) -> None:
    form = "pod" if "pod" in case else "compose"
    documents = list(yaml.safe_load_all(case[form]))
    places = list(places_of(documents))
    container, key = places[where % len(places)]
    container[key] = copy.deepcopy(odd)
    path = folder / "changed.yaml"
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    read = read_pod if form == "pod" else read_compose
    try:
        read(path, case.get("name"), {})
    except SpecError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_a_capture_takes_the_command_of_a_file_too(folder: Path) -> None:
    capture = Command("build", "capture", "-o", "b")
    written(folder, {"pod.yaml": POD.format("command: [/no/such/vllm, serve, m]"), "none.yaml": "a: 1"})

    assert "'/no/such/vllm' is no program on this machine" in capture.refusal("--from-vllm-pod", "pod.yaml")
    assert "none.yaml: has no services" in capture.refusal("--from-vllm-compose", "none.yaml")
    assert "Missing argument '-- COMMAND...'" in capture().output
    assert (
        "Give COMMAND or a file with it."
        in capture("--from-vllm-pod", "pod.yaml", "--", "vllm", "serve", "m").output
    )
