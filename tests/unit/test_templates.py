"""What users copy from ci/templates and docs/how-to: it parses, it is closed, and every command in it is one of ours."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from aotgaudi.cli.main import cli
from aotgaudi.commands.flags import NEUTRAL_FLAGS
from aotgaudi.digest import sha256_bytes
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.limits import Pin
from aotgaudi.from_vllm.spec import VllmSetup, spec_from_vllm
from aotgaudi.server.options import StopTimes
from aotgaudi.share.oci import BUNDLE_ROOT
from aotgaudi.wrap.adapters.base import Flags
from aotgaudi.wrap.adapters.vllm_gaudi import RULES, VLLM_GAUDI
from aotgaudi.wrap.sandbox import DEFAULT_ROOT
from tests.environment import requirements

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "ci" / "templates"
TEXTS = sorted([*TEMPLATES.iterdir(), *(ROOT / "docs" / "how-to").iterdir(), ROOT / "README.md"])


def commands(text: str) -> Iterator[list[str]]:
    """Every `aotgaudi ...` of a text, as words: after a line's beginning, a prompt, a dash, `run:`, `$(` or a back-tick."""
    text = re.sub(r"\\\n#?\s*", " ", text)
    for found in re.finditer(r"(?:^|[-:#$`]\s*|\$\(\s*)aotgaudi +([a-z][^\n`]*)", text, re.MULTILINE):
        line = re.sub(r"\$\{\{[^}]*\}\}", "EXPRESSION", found[1])
        line = re.split(r" \|\| | \| | && | > |\)$", line)[0]
        yield shlex.split(line, comments=True)


def code_of(text: str) -> str:
    """What stands in a Markdown text as code, in blocks or between back-ticks: the rest is prose."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(
        r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    return "\n".join([*blocks, *spans])


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_is_one_of_ours_with_options_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for words in commands(code_of(text) if path.suffix == ".md" else text):
        parse(words)


@pytest.mark.parametrize(
    "name", ["wrap-vllm.md", "wrap-vllm-gaudi.md", "wrap-sglang.md", "bake.md", "sign.md"]
)
def test_a_text_with_commands_is_seen_to_have_them(name: str) -> None:
    text = (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")

    assert len(list(commands(code_of(text)))) >= 3


def parse(words: list[str]) -> None:
    """Parses a command line without running it. Raises click.UsageError."""
    context: click.Context = click.Context(cli, info_name="aotgaudi", **cli.context_settings)
    command: click.Command = cli
    while isinstance(command, click.Group):
        if not words:
            return  # A group is spoken of.
        name = words[0]
        found = command.get_command(context, name)
        if found is None and command.name == "build":
            found = command.get_command(context, "all")  # `build SPEC` is `build all SPEC`.
        else:
            words = words[1:]
        assert found is not None, f"no command {name!r} in {command.name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    try:
        command.make_parser(context).parse_args(list(words))
    except click.BadOptionUsage as error:
        if words[-1] != error.option_name:  # An option is spoken of, without its value.
            raise


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse(["cache", "stats", "--nonsense"])
    with pytest.raises(AssertionError):
        parse(["cache", "nonsense"])


def documents(name: str) -> list[dict[Any, Any]]:
    return list(yaml.safe_load_all((TEMPLATES / name).read_text(encoding="utf-8")))


def steps(name: str) -> list[str]:
    """What a pipeline runs, in order."""
    (document,) = documents(name)
    if name == "github-actions.yml":
        return [step["run"] for job in document["jobs"].values() for step in job["steps"] if "run" in step]
    before = document["default"]["before_script"]
    return [line for job in ("check", "bundle") for line in [*before, *document[job]["script"]]]


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_a_pipeline_checks_builds_signs_publishes_and_gates(name: str) -> None:
    text = "\n".join(steps(name))
    order = [
        "build manifest",
        "coverage",
        "build cache",
        "--push",
        "build bundle",
        "--sign-key",
        "aotgaudi push model.bundle",
        "aotgaudi pull",
        "verify published.bundle --trusted-key bundle.key.pub",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_no_change_from_outside_writes_to_the_cache() -> None:
    (github,), (gitlab,) = documents("github-actions.yml"), documents("gitlab-ci.yml")

    assert github["jobs"]["bundle"]["if"] == "github.event_name == 'push'"
    assert github[True]["push"]["branches"] == ["main"]  # YAML 1.1 reads the key `on` as true.
    assert github["permissions"] == {"contents": "read"}
    assert not [step for step in github["jobs"]["check"]["steps"] if "push" in step.get("run", "")]
    assert "CI_DEFAULT_BRANCH" in gitlab["bundle"]["rules"][0]["if"]
    assert not [line for line in gitlab["check"]["script"] if "push" in line]


def test_the_deployment_cannot_write_and_starts_warm_or_not_at_all() -> None:
    by_kind = {document["kind"]: document for document in documents("kubernetes.yaml")}
    pod = by_kind["Deployment"]["spec"]["template"]
    spec = pod["spec"]
    (container,) = spec["containers"]
    arguments = dict(argument.removeprefix("--").partition("=")[::2] for argument in container["args"])

    parse([*container["command"][1:], *container["args"]])
    assert container["command"][0] == "aotgaudi"
    assert "require-warm" in arguments
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/ready"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert all(mount["readOnly"] for mount in mounts.values())
    assert mounts["bundle"]["subPath"] == BUNDLE_ROOT
    assert arguments["bundle"] == mounts["bundle"]["mountPath"]
    assert arguments["trusted-key"].startswith(mounts["key"]["mountPath"])
    (image,) = [volume["image"] for volume in spec["volumes"] if "image" in volume]
    assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", image["reference"])
    labels = by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == labels == by_kind["Service"]["spec"]["selector"]


def test_the_grace_period_is_longer_than_a_stop_takes_and_what_the_docs_say() -> None:
    deployment = next(d for d in documents("kubernetes.yaml") if d["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    delays = [a.partition("=")[2] for a in container["args"] if a.startswith("--drain-delay")]
    stop = StopTimes(delay=float(delays[0])) if delays else StopTimes()
    seconds = pod["terminationGracePeriodSeconds"]
    told = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")

    assert seconds > stop.delay + stop.drain + 2 * stop.flush
    assert f"terminationGracePeriodSeconds: {seconds}" in told
    assert container["readinessProbe"]["periodSeconds"] <= stop.delay / 2


@dataclass(frozen=True)
class Stage:
    """One stage of the Dockerfile: its name, what it starts from, and its instructions in order."""

    name: str
    base: str
    lines: tuple[tuple[str, str], ...]

    def last(self, instruction: str) -> str:
        return [rest for name, rest in self.lines if name == instruction][-1]


def dockerfile() -> list[Stage]:
    """The stages of the Dockerfile. What stands before the first is of no stage."""
    text = (TEMPLATES / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    rows = [line.split(maxsplit=1) for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines() if line]
    stages: list[Stage] = []
    for instruction, rest in rows:
        if instruction == "FROM":
            base, name = rest.split(" AS ")
            stages.append(Stage(name, base, ()))
        elif stages:
            stages[-1] = replace(stages[-1], lines=(*stages[-1].lines, (instruction, rest)))
    return stages


def test_the_dockerfile_gives_a_server_alone_and_one_with_a_bundle_that_serves_as_nobody() -> None:
    bundle, server, model = dockerfile()

    assert (bundle.name, bundle.base) == ("bundle", "${BUNDLE_IMAGE}")
    assert (server.name, model.name, model.base) == ("server", "model", "server")
    assert model.last("COPY") == f"--link --from=bundle ${{BUNDLE_PATH}} /{BUNDLE_ROOT}"
    assert model.last("ARG") == f"BUNDLE_PATH=/{BUNDLE_ROOT}"
    assert int(server.last("USER").partition(":")[0]) > 0
    assert "USER" not in dict(model.lines)
    for stage in (server, model):
        parse([*json.loads(stage.last("ENTRYPOINT"))[1:], *json.loads(stage.last("CMD"))])
    parse(json.loads(model.last("RUN"))[1:])
    deployed = next(d for d in documents("kubernetes.yaml") if d["kind"] == "Deployment")
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    assert container["image"] in (TEMPLATES / "Dockerfile").read_text(encoding="utf-8")


def test_every_recipe_installs_a_wheel_with_the_versions_that_it_carries() -> None:
    for name in ("github-actions.yml", "gitlab-ci.yml", "Dockerfile"):
        text = (TEMPLATES / name).read_text(encoding="utf-8")
        installs = re.findall(r"pip install [^&]*?(?:whl\S*)", re.sub(r"\\\n\s*", " ", text))
        assert installs, name
        assert all("--constraint" in line and "aotgaudi/constraints.txt" in line for line in installs)
    constraints = (ROOT / "aotgaudi" / "constraints.txt").read_text(encoding="utf-8")
    pinned = {canonicalize_name(line.partition("==")[0]) for line in constraints.splitlines()}
    for extra in (None, "build", "serve"):
        assert {canonicalize_name(Requirement(line).name) for line in requirements(extra)} - pinned - {
            "tomli"
        } == set()


def wrapped(words: list[str]) -> dict[str, str]:
    """Parses the command of a wrapped server; returns the options of `run`, and after ``--`` nothing of ours."""
    assert words[:2] == ["aotgaudi", "run"]
    parse(words[1:])
    ours = words[2 : words.index("--")]
    assert words[words.index("--") + 1 :][:2] == ["vllm", "serve"]
    return dict(word.removeprefix("--").partition("=")[::2] for word in ours)


@pytest.mark.parametrize("name", ["vllm-kubernetes.yaml", "vllm-gaudi-kubernetes.yaml"])
def test_a_wrapped_server_differs_by_the_prefix_the_bundle_and_the_probes(name: str) -> None:
    by_kind = {document["kind"]: document for document in documents(name)}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    options = wrapped(container["command"])
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert "require-warm" in options
    assert options["bundle"] == f"/{BUNDLE_ROOT}"
    assert ("bundle" in mounts) is ("gaudi" not in name)  # That of a Gaudi is in the image.
    if "bundle" in mounts:
        assert options["bundle"] == mounts["bundle"]["mountPath"]
        assert mounts["bundle"]["subPath"] == BUNDLE_ROOT
        assert mounts["bundle"]["readOnly"] is True
        assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", volumes["bundle"]["image"]["reference"])
    assert options["trusted-key"].startswith(mounts["key"]["mountPath"])
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/live",
    }
    assert {probe["port"] for probe in probes.values()} == {"warm"}
    assert options["listen"] == f"0.0.0.0:{ports['warm']}"
    assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    (drains,) = [word for word in container["command"] if word.startswith("--shutdown-timeout=")]
    assert float(drains.partition("=")[2]) < pod["spec"]["terminationGracePeriodSeconds"]
    assert set(mounts) == set(volumes)
    assert mounts["place"]["mountPath"] == str(DEFAULT_ROOT)
    assert "readOnly" not in mounts["place"]
    assert volumes["place"]["emptyDir"]["medium"] == "Memory"
    labels = by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == labels == by_kind["Service"]["spec"]["selector"]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(TEMPLATES.glob("*.yaml")):
        for document in documents(path.name):
            if document.get("kind") in ("Deployment", "Job"):
                name = document["metadata"]["name"]
                yield f"{path.name}-{name}", document["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


PODS = dict(pods())
CARDS = {
    name: pod
    for name, pod in PODS.items()
    if any("habana.ai/gaudi" in one["resources"]["limits"] for one in containers(pod))
}
RESTRICTED = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "image"}
"""Kinds of volumes that Kubernetes' restricted pod security standard lets a pod have, of those that templates use."""


@pytest.mark.parametrize("name", PODS)
def test_a_pod_meets_the_restricted_standard_as_a_user_of_its_own(name: str) -> None:
    pod = PODS[name]
    can_write = any("emptyDir" in volume for volume in pod["volumes"])

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert ("fsGroup" in pod["securityContext"]) is can_write
    assert {kind for volume in pod["volumes"] for kind in volume} - {"name"} <= RESTRICTED
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in containers(pod):
        assert "runAsUser" not in container["securityContext"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def words_of(container: dict[str, Any]) -> list[str]:
    """The words that a container runs: its command, or the last command of its shell script."""
    if container["command"][:2] == ["sh", "-c"]:
        return shlex.split(container["command"][2].rpartition("exec ")[2])
    return list(container["command"])


def place_of(container: dict[str, Any], path: str) -> dict[str, Any]:
    """The mount that a path lies in; ReadOnly's default is that of Kubernetes."""
    mounts = [m for m in container["volumeMounts"] if Path(path).is_relative_to(m["mountPath"])]
    assert mounts, f"{path} lies in no volume, and the root file system is read-only"
    return {"readOnly": False, **max(mounts, key=lambda mount: len(mount["mountPath"]))}


WRITTEN = {"-o", "--output", "--store"}
READ = {"--shapes", "--sign-key", "--trusted-key"}


@pytest.mark.parametrize("name", CARDS)
def test_a_pod_with_a_card_has_every_path_that_it_names_in_a_volume_that_it_may_use(name: str) -> None:
    pod = CARDS[name]
    for container in containers(pod):
        words = [part for word in words_of(container) for part in word.split("=", 1)]
        paths = {option: value for option, value in pairwise(words) if option in WRITTEN | READ}
        env = {one["name"]: one["value"] for one in container["env"]}
        written = [value for option, value in paths.items() if option in WRITTEN]
        written += [env[one] for one in ("HOME", "HABANA_LOGS", "TMPDIR") if one in env]

        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in container["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}
        assert "HOME" in env
        for path in written:
            assert place_of(container, path)["readOnly"] is False
        for path in set(paths.values()):
            place_of(container, path)
        if "vllm" in words:
            assert place_of(container, words[words.index("serve") + 1])["readOnly"] is True
            assert place_of(container, str(DEFAULT_ROOT))["mountPath"] == str(DEFAULT_ROOT)
            assert "HABANA_LOGS" in env
            assert {"habana.ai/gaudi", "hugepages-2Mi"} <= container["resources"]["limits"].keys()
            assert "HABANA_VISIBLE_DEVICES" not in env  # The device plugin sets it.


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def served(container: dict[str, Any], environ: dict[str, str]) -> Flags:
    """The flags of the server that a container captures or runs."""
    words = words_of(container)
    return VLLM_GAUDI.read(words[words.index("serve") + 1 :], environ)


def test_a_gaudi_is_captured_and_served_as_one_launch_that_the_spec_of_the_comment_is_for() -> None:
    text = (TEMPLATES / "vllm-capture-jobs.yaml").read_text(encoding="utf-8")
    (manifest,) = [words for words in commands(text) if words[:2] == ["build", "manifest"]]
    given = dict(pairwise(manifest[2:]))
    command = VllmCommand.parse(given["--from-vllm"])
    setup = VllmSetup(
        command=command,
        environment=command.assignments,
        config=LLAMA,
        version=given["--bucketing-version"],
        pin=Pin(num_blocks=int(given["--num-blocks"])),
        read_file=lambda path: path,
        digest_file=lambda path: sha256_bytes(path.encode()),
    )
    spec, _ = spec_from_vllm(setup)

    launches = []
    for pod in CARDS.values():
        for container in containers(pod):
            if "vllm" not in words_of(container):
                continue
            environ = {one["name"]: one["value"] for one in container["env"]}
            flags = served(container, environ)
            VLLM_GAUDI.shapes(
                spec, flags, environ
            )  # Raises for another command, or a table that is not closed.
            keyed = {name: value for name, value in flags.values.items() if name not in NEUTRAL_FLAGS}
            launches.append((flags.model, keyed, RULES.keyed(environ)))

    assert len(launches) == 3
    assert launches[0] == launches[1] == launches[2]
    assert "PT_HPU_LAZY_MODE" in launches[0][2]


def test_every_template_with_a_schema_is_held_against_it() -> None:
    checked = (ROOT / "ci" / "schemas").read_text(encoding="utf-8")
    patterns = [word for word in checked.split() if word.endswith((".yaml", ".yml"))]

    for path in (*TEMPLATES.glob("*.yaml"), *TEMPLATES.glob("*-*.yml")):
        assert any(path.match(pattern) for pattern in patterns), path.name


def test_the_images_and_the_pipelines_install_torch_from_one_index() -> None:
    """A bundle is served only by the torch that it was built with, down to ``+cpu``."""
    (github,), (gitlab,) = documents("github-actions.yml"), documents("gitlab-ci.yml")
    built_with = {github["env"]["TORCH_INDEX"], gitlab["variables"]["TORCH_INDEX"]}
    _, server, _ = dockerfile()
    served_with = {rest for name, rest in server.lines if name == "ARG" and rest.startswith("TORCH_INDEX=")}

    assert served_with == {f"TORCH_INDEX={index}" for index in built_with}


def test_the_compose_file_starts_the_same_and_lets_restored_libraries_be_loaded() -> None:
    (document,) = documents("vllm-compose.yaml")
    (service,) = document["services"].values()
    options = wrapped([*service["entrypoint"], *service["command"]])
    mounted = {row.split(":")[1]: row.split(":")[2] for row in service["volumes"]}

    assert "require-warm" in options
    assert {options["bundle"], options["trusted-key"], "/model"} == set(mounted)
    assert set(mounted.values()) == {"ro"}
    (place,) = service["tmpfs"]
    assert place.startswith(f"{DEFAULT_ROOT}:")
    uid, gid = service["user"].split(":")
    assert {"exec", "mode=0700", f"uid={uid}", f"gid={gid}"} <= set(place.partition(":")[2].split(","))
    assert int(uid) > 0
    assert service["healthcheck"]["test"][0] == "CMD"
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert f":{options['listen'].partition(':')[2]}/ready" in service["healthcheck"]["test"][-1]


def test_the_image_of_a_wrapped_server_starts_it_by_its_own_command() -> None:
    text = (TEMPLATES / "vllm.Dockerfile").read_text(encoding="utf-8")
    lines = dict(
        line.split(maxsplit=1) for line in text.splitlines() if line.startswith(("ENTRYPOINT", "CMD"))
    )

    words = [*json.loads(lines["ENTRYPOINT"]), *json.loads(lines["CMD"])]
    assert words[words.index("--bundle") + 1] == f"/{BUNDLE_ROOT}"
    wrapped(words)
    assert "python3 -m venv /opt/aotgaudi/venv" in text
    assert "--constraint /opt/aotgaudi/wheel/aotgaudi/constraints.txt" in text
    for name in ("vllm-kubernetes.yaml", "vllm-compose.yaml"):
        (image,) = re.findall(r"image: (registry\S+)", (TEMPLATES / name).read_text(encoding="utf-8"))
        assert image in text


def test_the_shards_of_a_capture_and_the_job_that_seals_them_agree() -> None:
    shards, merge = documents("vllm-capture-jobs.yaml")
    pods = [job["spec"]["template"]["spec"] for job in (shards, merge)]
    (one,), (whole, image) = pods[0]["containers"], pods[1]["initContainers"]
    (publish,) = pods[1]["containers"]
    num = shards["spec"]["completions"]
    ran, sealed = (words_of(container) for container in (one, whole))

    for words in (ran, sealed, words_of(image)):
        assert words[0] == "aotgaudi"
        parse(words[1:])
    assert [*ran[:7], *ran[9:]] == [*sealed[:7], *sealed[14:]]
    assert ran[7:9] == ["--shard", f"$((JOB_COMPLETION_INDEX + 1))/{num}"]
    assert sealed[7:11] == ["--shards", str(num), "--merge", "-o"]
    assert (shards["spec"]["completionMode"], shards["spec"]["parallelism"]) == ("Indexed", num)
    for name in ("image", "resources", "securityContext", "env"):
        assert one[name] == whole[name]
    assert one["volumeMounts"] == whole["volumeMounts"][:-1]
    assert pods[0]["volumes"] == pods[1]["volumes"][:-2]
    assert one["resources"]["limits"]["habana.ai/gaudi"] == 1
    assert "habana.ai/gaudi" not in image["resources"]["limits"]
    # The bundle is sealed, made an image of, and published under the name that the deployment's comment pulls.
    assert sealed[11] == words_of(image)[3]
    assert words_of(publish)[3].startswith("oci:" + words_of(image)[4].partition("=")[2])
    served = (TEMPLATES / "vllm-gaudi-kubernetes.yaml").read_text(encoding="utf-8")
    assert f"aotgaudi pull {words_of(publish)[4]} " in served
    assert f"--base docker://{one['image']} " in served


def test_the_key_that_signs_a_capture_is_copied_to_where_only_the_pod_reads_it() -> None:
    """A Secret's files belong to root, and with fsGroup the group reads them: such a key is refused."""
    _, merge = documents("vllm-capture-jobs.yaml")
    (whole, _) = merge["spec"]["template"]["spec"]["initContainers"]
    script = whole["command"][2]
    (copied,) = re.findall(r"install -m 600 (\S+) (\S+) &&", script)

    assert place_of(whole, copied[0])["readOnly"] is True
    assert f"--sign-key {copied[1]}" in script
