"""``aotgaudi build image``, ``cache push`` and ``cache pull``: what they print, and what misuse gives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.cli.push_pull import read_credentials
from aotgaudi.share.credentials import Credentials, Login
from tests.command import Command
from tests.unit.bundle.conftest import Sealed, sealed
from tests.unit.share.fake_registry import FakeRegistry, ask_for_basic, fake_registry, on, status

run = Command()

__all__ = ["sealed"]


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "some store"))


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def test_an_image_is_written_and_described(sealed: Sealed) -> None:
    result = done("build", "image", "bundle", "-o", "image", "--tag", "v1")

    manifest = json.loads(Path("image/index.json").read_bytes())["manifests"][0]["digest"]
    assert result.stdout.startswith(f"image: image:v1 {manifest} (layer of ")
    assert result.stdout.endswith("bundle at /opt/aotgaudi/bundle)\n")


def test_an_image_is_described_as_json_and_is_always_the_same(sealed: Sealed) -> None:
    documents = [
        json.loads(done("build", "image", "bundle", "-o", name, "--compression", "gzip", "--json").stdout)
        for name in ("a", "b")
    ]

    assert {document.pop("layout") for document in documents} == {"a", "b"}
    assert documents[0] == documents[1]
    assert documents[0]["tag"] == "latest"
    assert set(documents[0]) == {"tag", "manifest", "layer", "layer_bytes", "diff_id", "path"}


@pytest.mark.parametrize("has_key", [False, True])
def test_an_image_that_claims_too_much_is_refused_in_one_line_and_leaves_nothing(
    sealed: Sealed, registry: FakeRegistry, has_key: bool
) -> None:
    done("build", "image", "bundle", "-o", "image", "--push", f"{registry.host}/team/model:v1")
    done("key", "generate", "key")
    manifest = json.loads(registry.manifests["v1"])
    manifest["layers"][-1]["size"] = 4 << 40
    registry.manifests["v1"] = json.dumps(manifest).encode()
    before = set(os.listdir())

    demand = ("--trusted-key", "key.pub") if has_key else ()
    result = run("cache", "pull", f"{registry.host}/team/model:v1", "-o", "out", *demand)

    assert result.exit_code == 4
    assert len(result.stderr.splitlines()) == 1
    assert ("is not signed" if has_key else "claims a layer of 4398046511104 bytes") in result.stderr
    assert set(os.listdir()) == before


def test_an_image_goes_to_a_registry_and_comes_back_a_bundle(sealed: Sealed, registry: FakeRegistry) -> None:
    pushed = done("build", "image", "bundle", "-o", "image", "--push", f"{registry.host}/team/model:v1")
    reference = pushed.stdout.splitlines()[1].removeprefix("pushed: ")
    done("cache", "pull", f"{registry.host}/team/model:v1", "-o", "by-tag")
    done("cache", "pull", reference, "-o", "by-digest")
    done("cache", "pull", "oci:image:v1", "-o", "by-layout")
    done("cache", "pull", "oci:image", "-o", "by-layout")

    for name in ("by-tag", "by-digest", "by-layout"):
        assert open_bundle(Path(name)).index == sealed.open().index
    assert "team/model@sha256:" in reference
    assert "v1" in registry.manifests


@pytest.mark.parametrize("kind", ["registry", "directory", "url"])
def test_a_bundle_goes_and_comes_back(
    sealed: Sealed, registry: FakeRegistry, kind: str, tmp_path: Path
) -> None:
    where = {
        "registry": f"{registry.host}/team/cache",
        "directory": "./cache",
        "url": f"file://{tmp_path}/cache",
    }[kind]

    first = done("cache", "push", where, "bundle", "--name", "v2")
    second = json.loads(done("cache", "push", where, "bundle", "--name", "v2", "--json").stdout)
    pulled = done("cache", "pull", where, "-o", "out", "--name", "v2")

    assert "(8 objects, 8 objects uploaded" in first.stdout
    assert (second["num_objects"], second["num_uploaded"], second["name"]) == (8, 0, "v2")
    assert (
        pulled.stdout == "pulled: out (5 objects, 0.7 kB, all verified)\n" or "all verified" in pulled.stdout
    )
    assert open_bundle(Path("out")).index == sealed.open().index
    assert run("cache", "pull", where, "-o", "other").exit_code == 2  # No bundle is named latest.


def test_a_bad_remote_beside_a_good_one_is_a_warning(sealed: Sealed, registry: FakeRegistry) -> None:
    done("cache", "push", "./good", "bundle")
    registry.faults.append(on("GET", "", status(403)))

    result = done("cache", "pull", f"{registry.host}/team/cache", "--remote", "./good", "-o", "out")

    assert open_bundle(Path("out")).index == sealed.open().index
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"warning: {registry.host}/team/cache: not authorised")
    assert line.endswith("going on without this remote")


def test_json_of_a_pull_says_what_came(sealed: Sealed) -> None:
    done("cache", "push", "./cache", "bundle")

    document = json.loads(done("cache", "pull", "./cache", "-o", "out", "--json").stdout)

    assert document == {
        "bundle": "out",
        "manifest_id": sealed.manifest_id,
        "num_objects": 5,
        "size_bytes": sealed.open().index.counts.object_bytes,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["build", "image", "nothing", "-o", "i"], 2, "no bundle at nothing"),
        (["build", "image", "bundle", "-o", "bundle"], 2, "neither empty nor an image layout"),
        (["build", "image", "bundle", "-o", "i", "--tag", "a b"], 2, "is no name for a bundle"),
        (["build", "image", "bundle", "-o", "i", "--base", "nothing"], 2, "nothing is no OCI image layout"),
        (["build", "image", "bundle", "-o", "i", "--push", "team/x"], 2, "is no reference"),
        (["build", "image", "bundle", "-o", "i", "--push", f"a.b/x@sha256:{'0' * 64}"], 2, "names a digest"),
        (["build", "image", "bundle", "-o", "i", "--compression", "xz"], 2, "'xz' is not one of"),
        (["build", "image", "bundle"], 2, "Missing option '-o'"),
        (["cache", "push", "cache", "bundle"], 2, "a directory is ./cache"),
        (["cache", "push", "oci:image", "bundle"], 2, "to pull from"),
        (["cache", "push", "./cache", "nothing"], 2, "nothing: there is no such file"),
        (["cache", "push", "./cache", "bundle", "--name", "../x"], 2, "is no name for a bundle"),
        (["cache", "push", "./cache", "nothing", "--name", "x"], 2, "--name names a bundle"),
        (["cache", "push", "s4://x/y", "bundle"], 2, "Protocol not known"),
        (["cache", "pull", "./cache"], 2, "say what to pull"),
        (["cache", "pull", "./cache", "m.toml", "-o", "out"], 2, "say what to pull"),
        (["cache", "pull", "./cache", "-o", "out"], 2, "no bundle 'latest' at cache"),
        (["cache", "pull", "oci:nothing", "-o", "out"], 2, "nothing is no OCI image layout"),
        (["cache", "pull", "oci:a", "--remote", "./b", "-o", "out"], 2, "is an image layout"),
        (["cache", "pull", "oci:a", "m.toml"], 2, "is an image layout"),
        (["cache", "pull", "a.b/x:v1", "--remote", "a.b/x:v2", "-o", "out"], 2, "different tags (v1, v2)"),
        (["cache", "pull", "./cache", "-o", "store"], 2, "neither a bundle nor empty"),
    ],
)
def test_misuse_is_said_in_one_line(sealed: Sealed, arguments: list[str], code: int, words: str) -> None:
    result = run(*arguments)

    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert not Path("out").exists()


def test_a_damaged_remote_is_exit_code_4(sealed: Sealed, tmp_path: Path) -> None:
    done("cache", "push", "./cache", "bundle")
    for path in (path for path in (tmp_path / "cache" / "objects").rglob("*") if path.is_file()):
        path.chmod(0o644)
        path.write_bytes(b"x" * path.stat().st_size)

    result = run("cache", "pull", "./cache", "-o", "out")

    assert result.exit_code == 4
    assert "not what its digest says" in result.stderr
    done("cache", "push", "./cache", "bundle", "--force")
    done("cache", "pull", "./cache", "-o", "out")


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ORAS_USER", "ORAS_PASS", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert read_credentials("a.b") == Credentials()
    monkeypatch.setenv("ORAS_USER", "me")
    monkeypatch.setenv("ORAS_PASS", "secret")
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/x")
    at_home = (Path("/h/.docker/config.json"), Path("/x/containers/auth.json"))

    assert read_credentials("a.b") == Credentials((Login("a.b", "me", "secret"),), at_home)
    assert read_credentials(None) == Credentials((), at_home)
    monkeypatch.setenv("DOCKER_CONFIG", "/d")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/r.json")
    files = (Path("/r.json"), Path("/d/config.json"), at_home[1])
    assert read_credentials(None, ["c.d"]) == Credentials((), files, frozenset({"c.d"}))


def test_the_password_of_the_environment_is_for_the_first_registry_alone(
    sealed: Sealed, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORAS_USER", "me")
    monkeypatch.setenv("ORAS_PASS", "secret")
    done("cache", "push", f"{registry.host}/team/cache", "bundle")
    with fake_registry() as first:
        for each in (first, registry):
            each.authorizations.clear()
            each.faults.append(lambda handler: ask_for_basic(handler, "me:secret"))

        refused = run(
            "cache", "pull", f"{first.host}/team/none", "--remote", f"{registry.host}/team/cache", "-o", "out"
        )

    assert refused.exit_code == 2
    assert any(first.authorizations)
    assert not any(registry.authorizations)


def test_help_imports_neither_a_registry_nor_a_compressor() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from aotgaudi.cli.main import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('requests', 'fsspec', 'zstandard', 'torch', 'rich') if m in sys.modules])"
    )
    for command in (["cache", "pull"], ["cache", "push"], ["build", "image"]):
        output = subprocess.run(
            [sys.executable, "-c", code, *command, "--help"], check=True, capture_output=True, text=True
        ).stdout
        assert output.splitlines()[-1] == "[]"
