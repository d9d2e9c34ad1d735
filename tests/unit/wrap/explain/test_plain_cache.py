"""Why a cache of vLLM's that nobody sealed is not used. Artifacts have the members that torch 2.13 and vLLM 0.32 save."""

from __future__ import annotations

import os
import pickle
import platform
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.wrap.explain.cache_findings import examine
from aotgaudi.wrap.explain.plain_cache import find_plain_cache, read_plain_cache
from tests.guests_here import Here, vllm_here

HASH = "ab" * 32
SOURCE = "# vLLM's model\nclass Llama: ...\n"
KIND = ("torch._dynamo.aot_compile_types", "BundledAOTAutogradSerializableCallable")


def artifact_bytes(
    place: Path, *, torch: str = "2.13.0+cpu", source: str = SOURCE, bundled: bool = False
) -> bytes:
    """The texts of an artifact, in the order in which they stand."""
    state = {
        "code": f"# {place}/torch_compile_cache/torch_aot_compile/{HASH}/inductor_cache/aa/x.so",
        "source_info": {
            "inlined_sources": [{"module": "vllm.models.llama", "checksum": "c0", "content": source}]
        },
        "system_info": {"python_version": platform.python_version(), "torch_version": torch},
    }
    data = pickle.dumps(state, 4)
    if not bundled:
        return data
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() + b"\x94" for word in KIND)
    return data[:-1] + words + b"\x93" + b"."  # Two texts, and STACK_GLOBAL.


@pytest.fixture
def here(tmp_path: Path) -> Here:
    found = vllm_here(tmp_path)
    found.environ["VLLM_CACHE_ROOT"] = str(tmp_path / "cache")
    return found


def fill(here: Here, ranks: int = 1, **changes: Any) -> Path:
    root = here.folder / "cache"
    for rank in range(ranks):
        folder = root / "torch_compile_cache" / "torch_aot_compile" / HASH / f"rank_{rank}_0"
        folder.mkdir(parents=True)
        (folder / "model").write_bytes(artifact_bytes(root, **changes))
    (root / "modelinfos").mkdir(parents=True, exist_ok=True)
    (root / "modelinfos" / "x.json").write_text('{"modelinfo": {"architecture": "LlamaForCausalLM"}}')
    return root


def misses(here: Here, *words: object, **environ: str) -> list[str]:
    root = here.folder / "cache"
    found = here.find("vllm", "serve", here.model(), *words, **environ)
    return [finding.text for finding in examine(read_plain_cache(root), found) if finding.is_miss]


def test_what_an_artifact_says_of_itself_is_read(here: Here) -> None:
    cache = read_plain_cache(fill(here))

    (artifact,) = cache.artifacts
    assert (artifact.hash, artifact.rank) == (HASH, 0)
    assert artifact.torch == "2.13.0+cpu"
    assert artifact.python == platform.python_version()
    assert artifact.place == str(here.folder / "cache")
    assert artifact.sources == {"vllm.models.llama": SOURCE}
    assert cache.architectures == ("LlamaForCausalLM",)


def test_a_cache_with_which_nothing_is_wrong_has_no_miss(here: Here) -> None:
    fill(here)

    assert misses(here) == []


def test_another_torch_is_a_miss(here: Here) -> None:
    fill(here, torch="2.12.0+cpu")

    assert "made by torch 2.12.0+cpu, here is 2.13.0+cpu" in misses(here)[0]


def test_a_source_that_changed_is_a_miss_and_named(here: Here) -> None:
    fill(here)
    root = read_plain_cache(here.folder / "cache")
    found = here.find("vllm", "serve", here.model())
    site = here.folder / "packages"
    (site / "vllm" / "models").mkdir(parents=True)
    (site / "vllm" / "models" / "llama.py").write_text(SOURCE + "patched = True\n")
    installed = found.installed.model_copy(update={"site_packages": str(site)})
    moved = type(found)(
        **{**{name: getattr(found, name) for name in found.__slots__}, "installed": installed}
    )

    texts = [finding.text for finding in examine(root, moved) if finding.is_miss]

    assert len(texts) == 1
    assert "traced from another vllm.models.llama" in texts[0]


def test_an_artifact_that_this_vllm_cannot_load_is_named_with_its_repair(here: Here) -> None:
    fill(here, bundled=True)
    root = read_plain_cache(here.folder / "cache")
    found = here.find("vllm", "serve", here.model())
    site = here.folder / "packages"
    for name, text in {
        "vllm/compilation/decorators.py": "loaded_fn._artifacts.compiled_fn.finalize_loading(config)",
        "torch/_dynamo/aot_compile_types.py": "class BundledAOTAutogradSerializableCallable: ...",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    installed = found.installed.model_copy(update={"site_packages": str(site)})
    moved = type(found)(
        **{**{name: getattr(found, name) for name in found.__slots__}, "installed": installed}
    )

    texts = [finding.text for finding in examine(root, moved) if finding.is_miss]

    assert "vllm.finalize-loading" in texts[0]


def test_a_command_that_looks_elsewhere_is_told_where(here: Here) -> None:
    fill(here)

    (text,) = misses(here, VLLM_CACHE_ROOT="/elsewhere")

    assert text.startswith("this command looks in /elsewhere")


def test_ranks_without_an_artifact_are_a_miss(here: Here) -> None:
    fill(here)

    assert misses(here, "-tp", "2") == ["this command has 2 ranks, the artifacts are for 1 at most"]


def test_another_kind_of_model_is_a_miss(here: Here) -> None:
    fill(here)
    model = here.model("qwen", architectures=["Qwen3ForCausalLM"])
    found = here.find("vllm", "serve", model)

    texts = [one.text for one in examine(read_plain_cache(here.folder / "cache"), found) if one.is_miss]

    assert texts == ["this command serves Qwen3ForCausalLM; served from this cache was LlamaForCausalLM"]


@pytest.mark.parametrize(("size", "text"), [(0, "is empty"), (40, "is cut off, or damaged")])
def test_an_artifact_that_was_not_written_whole_is_a_miss(here: Here, size: int, text: str) -> None:
    root = fill(here)
    path = next(root.rglob("model"))
    path.write_bytes(path.read_bytes()[:size])

    assert text in misses(here)[0]


def test_a_variable_that_vllm_wrote_down_otherwise_is_a_miss(here: Here) -> None:
    root = fill(here)
    folder = root / "torch_compile_cache" / "0123456789" / "rank_0_0" / "backbone"
    folder.mkdir(parents=True)
    (folder / "cache_key_factors.json").write_text('{"env": {"VLLM_MLA_DISABLE": false, "VLLM_USE_X": "a"}}')

    assert misses(here, VLLM_MLA_DISABLE="0", VLLM_USE_X="a") == []
    assert "VLLM_USE_X is 'b'" in misses(here, VLLM_USE_X="b")[0]
    assert "VLLM_MLA_DISABLE is '1'" in misses(here, VLLM_MLA_DISABLE="1")[0]


def test_a_cache_that_others_may_write_to_is_told_of(here: Here) -> None:
    root = fill(here)
    root.chmod(0o777)

    assert any("others may write to" in finding.text for finding in examine(read_plain_cache(root)))


def test_nothing_is_written_and_an_empty_cache_says_so(here: Here) -> None:
    root = here.folder / "cache"
    (root / "torch_compile_cache").mkdir(parents=True)
    before = sorted(os.walk(here.folder))

    (finding,) = examine(read_plain_cache(root))

    assert finding.is_miss
    assert "nothing was ever saved here" in finding.text
    assert sorted(os.walk(here.folder)) == before


def test_a_directory_within_a_cache_is_taken_for_the_cache(here: Here) -> None:
    root = fill(here)

    assert find_plain_cache(root / "torch_compile_cache" / "torch_aot_compile") == root
    assert find_plain_cache(here.folder / "tiny") is None


def test_a_fifo_in_its_place_is_refused(here: Here) -> None:
    root = fill(here)
    path = next(root.rglob("model"))
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(SpecError, match="FIFO"):
        read_plain_cache(root)


def test_once_enough_was_read_of_other_ranks_only_the_end_is_looked_at(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fill(here, ranks=3)
    monkeypatch.setattr("aotgaudi.wrap.explain.plain_cache._MOST_BYTES", 1)
    (root / "torch_compile_cache" / "torch_aot_compile" / HASH / "rank_2_0" / "model").write_bytes(
        b"\x80\x04cut"
    )

    first, second, third = read_plain_cache(root).artifacts

    assert (first.torch, second.torch) == ("2.13.0+cpu", None)
    assert (first.strings.is_whole, second.strings.is_whole, third.strings.is_whole) == (True, True, False)
