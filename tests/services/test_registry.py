"""docker-registry 2.8, skopeo and umoci read what we write, and we read what they hand on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.verify import verify_bundle
from tests.services.conftest import PASSWORD, USER, RealRegistry, aotgaudi, auth_of, command, files, need, run
from tests.unit.bundle.conftest import Sealed

INDEX = "io.github.aotgaudi.bundle-index"


def copy(*arguments: object) -> None:
    """``skopeo copy`` to and from the loopback registry."""
    need("skopeo")
    command("skopeo", "copy", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false", *arguments)


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_skopeo_reads_the_layout_and_copies_the_image(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path, compression: str
) -> None:
    out = aotgaudi(
        "build", "image", sealed.path, "-o", tmp_path / "image", "--compression", compression, "--json"
    )
    written = json.loads(out.stdout)

    seen = json.loads(command("skopeo", "inspect", f"oci:{tmp_path / 'image'}:latest"))
    copy(f"oci:{tmp_path / 'image'}:latest", f"docker://{registry.host}/team/model:v1")
    there = json.loads(
        command("skopeo", "inspect", "--tls-verify=false", f"docker://{registry.host}/team/model:v1")
    )
    aotgaudi("cache", "pull", f"{registry.host}/team/model:v1", "-o", tmp_path / "pulled")

    assert seen["Digest"] == there["Digest"] == written["manifest"]
    assert seen["Layers"] == [written["layer"]]
    assert seen["Labels"]["io.github.aotgaudi.manifest-id"] == sealed.manifest_id
    assert (seen["Architecture"], seen["Os"]) == ("amd64", "linux")
    assert files(tmp_path / "pulled") == files(sealed.path)


def test_what_we_push_skopeo_copies_and_we_unpack(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path
) -> None:
    name = f"{registry.host}/team/model:v1"
    out = aotgaudi("build", "image", sealed.path, "-o", tmp_path / "image", "--push", name, "--json")
    reference = json.loads(out.stdout)["pushed"]

    copy(f"docker://{name}", f"oci:{tmp_path / 'copied'}:v1")
    aotgaudi("cache", "pull", f"oci:{tmp_path / 'copied'}:v1", "-o", tmp_path / "from-copy")
    aotgaudi("cache", "pull", reference, "-o", tmp_path / "by-digest")

    assert files(tmp_path / "from-copy") == files(tmp_path / "by-digest") == files(sealed.path)


def test_umoci_unpacks_the_image_to_the_bundle(sealed: Sealed, tmp_path: Path) -> None:
    aotgaudi("build", "image", sealed.path, "-o", tmp_path / "image", "--compression", "gzip")

    command("umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'image'}:latest", tmp_path / "runtime")

    unpacked = tmp_path / "runtime" / "rootfs" / "opt" / "aotgaudi" / "bundle"
    assert files(unpacked) == files(sealed.path)
    assert verify_bundle(open_bundle(unpacked)).is_intact


def test_on_a_base_that_umoci_made(sealed: Sealed, registry: RealRegistry, tmp_path: Path) -> None:
    base = f"{tmp_path / 'base'}:base"
    command("umoci", "init", "--layout", tmp_path / "base")
    command("umoci", "new", "--image", base)
    (tmp_path / "hello").write_text("hello")
    command("umoci", "insert", "--rootless", "--image", base, tmp_path / "hello", "/etc/hello")
    command(
        "umoci",
        "config",
        "--image",
        base,
        "--config.env",
        "A=b",
        "--config.entrypoint",
        "/run",
        "--architecture",
        "amd64",
    )

    name = f"{registry.host}/team/model:v1"
    arguments = ["--base", base, "--compression", "gzip", "--push", name]
    aotgaudi("build", "image", sealed.path, "-o", tmp_path / "image", *arguments)

    config = json.loads(command("skopeo", "inspect", "--config", "--tls-verify=false", f"docker://{name}"))
    assert "A=b" in config["config"]["Env"]
    assert config["config"]["Entrypoint"] == ["/run"]
    assert len(config["rootfs"]["diff_ids"]) == 2
    assert config["history"][-1]["created_by"] == "aotgaudi build image"
    copy(f"docker://{name}", f"oci:{tmp_path / 'copied'}:v1")
    command("umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'copied'}:v1", tmp_path / "runtime")
    root = tmp_path / "runtime" / "rootfs"
    assert (root / "etc" / "hello").read_text() == "hello"
    assert files(root / "opt" / "aotgaudi" / "bundle") == files(sealed.path)


def test_a_bundle_as_an_artifact_survives_skopeo_and_garbage_collection(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path
) -> None:
    name = f"{registry.host}/team/cache:v1"
    reference = json.loads(aotgaudi("cache", "push", name, sealed.path, "--json").stdout)["reference"]
    command("docker-registry", "garbage-collect", registry.root.parent / "registry.yml")

    aotgaudi("cache", "pull", reference, "-o", tmp_path / "pulled")
    copy(f"docker://{name}", f"oci:{tmp_path / 'layout'}:v1")
    copy(f"oci:{tmp_path / 'layout'}:v1", f"docker://{registry.host}/other/cache:v1")
    aotgaudi("cache", "pull", f"{registry.host}/other/cache:v1", "-o", tmp_path / "copied")

    assert files(tmp_path / "pulled") == files(tmp_path / "copied") == files(sealed.path)


def test_a_second_push_uploads_nothing(sealed: Sealed, registry: RealRegistry) -> None:
    name = f"{registry.host}/team/cache:v1"
    first = json.loads(aotgaudi("cache", "push", name, sealed.path, "--json").stdout)
    second = json.loads(aotgaudi("cache", "push", name, sealed.path, "--json").stdout)

    assert first["num_uploaded"] == first["num_objects"]
    assert second == {**first, "num_uploaded": 0, "uploaded_bytes": 0}


def test_a_tag_that_moves_does_not_move_a_digest(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path
) -> None:
    name = f"{registry.host}/team/cache"
    first = json.loads(aotgaudi("cache", "push", f"{name}:latest", sealed.path, "--json").stdout)["reference"]
    shared = sealed.receipt.model_copy(update={"builder": {"aotgaudi": "2"}})
    sealed.pack(sealed.path.parent / "newer", receipt=shared)
    aotgaudi("cache", "push", f"{name}:latest", sealed.path.parent / "newer")

    aotgaudi("cache", "pull", first, "-o", tmp_path / "old")
    aotgaudi("cache", "pull", f"{name}:latest", "-o", tmp_path / "new")

    assert files(tmp_path / "old") == files(sealed.path)
    assert files(tmp_path / "new") == files(sealed.path.parent / "newer")


def test_a_blob_that_rots_in_the_registry_is_found(
    sealed: Sealed, registry: RealRegistry, tmp_path: Path
) -> None:
    name = f"{registry.host}/team/cache:v1"
    aotgaudi("cache", "push", name, sealed.path)
    path = registry.blob(f"sha256:{sealed.digests['layer.so'].sha256}")
    path.write_bytes(b"x" * sealed.digests["layer.so"].size_bytes)

    bad = run("cache", "pull", name, "-o", tmp_path / "out")
    assert (bad.exit_code, (tmp_path / "out").exists()) == (4, False)
    assert "not what its digest says" in bad.stderr

    aotgaudi("cache", "push", tmp_path / "good", sealed.path, "--name", "v1")
    good = aotgaudi("cache", "pull", name, "--remote", tmp_path / "good", "-o", tmp_path / "out")
    assert files(tmp_path / "out") == files(sealed.path)
    assert "warning: " in good.stderr


def test_a_registry_that_wants_a_password_gets_it(
    sealed: Sealed, closed_registry: RealRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{closed_registry.host}/team/cache:v1"
    for variable in ("ORAS_USER", "ORAS_PASS", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    refused = run("cache", "push", name, sealed.path)
    assert refused.exit_code == 2
    assert "not authorised" in refused.stderr

    config = {"auths": {closed_registry.host: {"auth": auth_of(USER, PASSWORD)}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    aotgaudi("cache", "push", name, sealed.path)

    monkeypatch.delenv("DOCKER_CONFIG")
    monkeypatch.setenv("ORAS_USER", USER)
    monkeypatch.setenv("ORAS_PASS", PASSWORD)
    aotgaudi("cache", "pull", name, "-o", tmp_path / "out")
    aotgaudi(
        "build",
        "image",
        sealed.path,
        "-o",
        tmp_path / "image",
        "--push",
        f"{closed_registry.host}/team/image:v1",
    )
    assert files(tmp_path / "out") == files(sealed.path)

    monkeypatch.setenv("ORAS_PASS", "wrong")
    wrong = run("cache", "pull", name, "-o", tmp_path / "no")
    assert wrong.exit_code == 2
    assert "wrong" not in wrong.output
    assert not os.path.exists(tmp_path / "no")
