"""docker-registry 2.8, skopeo and umoci read what we write, and we read what they hand on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.verify import verify_bundle
from tests.services.conftest import PASSWORD, USER, RealRegistry, aotgaudi, command, files, need, run
from tests.unit.bundle.conftest import Sealed


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_an_image_goes_to_a_registry_and_its_bundle_comes_back(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path, compression: str
) -> None:
    need("skopeo")
    name, layout = f"docker://{registry.host}/team/model:v1", tmp_path / "image"
    out = aotgaudi("build", "image", sealed.path, "-o", layout, "--compression", compression, "--json")
    written = json.loads(out.stdout)

    pushed = json.loads(aotgaudi("push", f"oci:{layout}:latest", name, "--insecure", "--json").stdout)
    there = json.loads(command("skopeo", "inspect", "--tls-verify=false", name))
    aotgaudi("pull", name, "-o", tmp_path / "by-tag", "--insecure")
    aotgaudi("pull", f"docker://{pushed['pushed']}", "-o", tmp_path / "by-digest", "--insecure")

    assert pushed["pushed"] == f"{registry.host}/team/model@{written['manifest']}"
    assert there["Digest"] == written["manifest"]
    assert there["Layers"] == [written["layer"]]
    assert there["Labels"]["io.github.aotgaudi.manifest-id"] == sealed.manifest_id
    assert (there["Architecture"], there["Os"]) == ("amd64", "linux")
    assert files(tmp_path / "by-tag") == files(tmp_path / "by-digest") == files(sealed.path)


def test_a_bundle_goes_through_whatever_skopeo_writes(sealed: Sealed, tmp_path: Path) -> None:
    need("skopeo")
    for name in (f"oci-archive:{tmp_path / 'image.tar'}:v1", f"oci:{tmp_path / 'layout'}:v1"):
        aotgaudi("push", sealed.path, name)
        aotgaudi("pull", name, "-o", tmp_path / "out")

        assert files(tmp_path / "out") == files(sealed.path)


def test_umoci_unpacks_the_image_to_the_bundle(sealed: Sealed, tmp_path: Path) -> None:
    aotgaudi("build", "image", sealed.path, "-o", tmp_path / "image", "--compression", "gzip")

    command("umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'image'}:latest", tmp_path / "runtime")

    unpacked = tmp_path / "runtime" / "rootfs" / "opt" / "aotgaudi" / "bundle"
    assert files(unpacked) == files(sealed.path)
    assert verify_bundle(open_bundle(unpacked)).is_intact


def test_on_a_base_that_umoci_made(sealed: Sealed, registry: RealRegistry, tmp_path: Path) -> None:
    base, name = f"{tmp_path / 'base'}:base", f"docker://{registry.host}/team"
    command("umoci", "init", "--layout", tmp_path / "base")
    command("umoci", "new", "--image", base)
    (tmp_path / "hello").write_text("hello")
    command("umoci", "insert", "--rootless", "--image", base, tmp_path / "hello", "/etc/hello")
    settings = ["--config.env", "A=b", "--config.entrypoint", "/run", "--architecture", "amd64"]
    command("umoci", "config", "--image", base, *settings)
    command("skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{base}", f"{name}/base:v1")

    arguments = ["--compression", "gzip", "--insecure", "--push", f"{name}/model:v1"]
    aotgaudi("build", "image", sealed.path, "-o", tmp_path / "a", "--base", f"{name}/base:v1", *arguments)
    aotgaudi("build", "image", sealed.path, "-o", tmp_path / "b", "--base", base, "--compression", "gzip")

    assert files(tmp_path / "a") == files(tmp_path / "b")
    config = json.loads(command("skopeo", "inspect", "--config", "--tls-verify=false", f"{name}/model:v1"))
    assert "A=b" in config["config"]["Env"]
    assert config["config"]["Entrypoint"] == ["/run"]
    assert len(config["rootfs"]["diff_ids"]) == 2
    assert config["history"][-1]["created_by"] == "aotgaudi build image"
    command("umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'a'}:latest", tmp_path / "runtime")
    root = tmp_path / "runtime" / "rootfs"
    assert (root / "etc" / "hello").read_text() == "hello"
    assert files(root / "opt" / "aotgaudi" / "bundle") == files(sealed.path)


def test_a_blob_that_rots_in_the_registry_is_found(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path
) -> None:
    name = f"docker://{registry.host}/team/model:v1"
    aotgaudi("push", sealed.path, name, "--insecure")
    (layer,) = json.loads(command("skopeo", "inspect", "--tls-verify=false", name))["Layers"]
    path = registry.blob(layer)
    path.write_bytes(b"x" * path.stat().st_size)

    bad = run("pull", name, "-o", tmp_path / "out", "--insecure")

    assert (bad.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert bad.stderr.startswith("error: skopeo: ")
    assert len(bad.stderr.splitlines()) == 1


def test_credentials_are_skopeo_s(
    sealed: Sealed, closed_registry: RealRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"docker://{closed_registry.host}/team/model:v1"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))

    refused = run("push", sealed.path, name, "--insecure")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: skopeo: ")

    login = ["--tls-verify=false", "--username", USER, "--password", PASSWORD]
    command("skopeo", "login", *login, closed_registry.host)
    aotgaudi("push", sealed.path, name, "--insecure")
    aotgaudi("pull", name, "-o", tmp_path / "out", "--insecure")
    assert files(tmp_path / "out") == files(sealed.path)
