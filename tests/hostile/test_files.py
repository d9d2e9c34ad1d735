"""What lies in the bundle and in the model directory is changed while it is served, or was never good."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Workplace, copy_bundle, eventually
from tests.hostile.conftest import Trial


def fill(byte: bytes) -> Callable[[Path], None]:
    """Overwrites a file in place."""

    def overwrite(path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(byte * size)

    return overwrite


def truncate(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(fill(b"\xcc"), id="traps"),
        pytest.param(fill(b"\0"), id="zeros", marks=pytest.mark.nightly),
        pytest.param(truncate, id="truncated"),
    ],
)
def test_h5_a_bundle_and_a_model_changed_in_place_while_served(
    trial: Trial, workplace: Workplace, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "bundle")
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    with trial(server=workplace.serve(bundle=bundle, model=model)) as it:
        for path in (*bundle.rglob("*"), *model.rglob("*")):
            if path.is_file():
                damage(path)
        it.expect(not eventually(lambda: it.server.process.poll() is not None, 5), "the server has died")


def nested(path: Path) -> None:
    path.write_text("[" * 200_000 + "]" * 200_000)


def nested_object(path: Path) -> None:
    path.write_text('{"a":' * 200_000 + "1" + "}" * 200_000)


def not_a_number(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "rms_norm_eps": float("nan")}))


def six_gigabytes(path: Path) -> None:
    os.truncate(path, 6 * 10**9)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def five(path: Path) -> None:
    path.with_name("model.safetensors").rename(path.with_name("model-00001.safetensors"))
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": 5}}))


def shards(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """Has the index of shards damaged; the single file must not be there then."""

    def change(path: Path) -> None:
        path.with_name("model.safetensors").unlink()
        damage(path)

    return change


MALFORMED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "config nested deeply": ("config.json", nested),
    "config nested deeply in objects": ("config.json", nested_object),
    "config with NaN": ("config.json", not_a_number),
    "config of 6 GB": ("config.json", six_gigabytes),
    "config as a FIFO": ("config.json", fifo),
    "generation config nested deeply": ("generation_config.json", nested),
    "generation config as a FIFO": ("generation_config.json", fifo),
    "tokenizer config nested deeply": ("tokenizer_config.json", nested),
    "tokenizer config as a FIFO": ("tokenizer_config.json", fifo),
    "tokenizer nested deeply": ("tokenizer.json", nested_object),
    "index nested deeply": ("model.safetensors.index.json", shards(nested)),
    "index with a number for a file": ("model.safetensors.index.json", five),
    "weights as a FIFO": ("model.safetensors", fifo),
    "weights of a header of 200,000 brackets": ("model.safetensors", nested),
}


@pytest.mark.parametrize(("name", "damage"), MALFORMED.values(), ids=MALFORMED)
def test_l2_a_malformed_model_directory_is_refused_in_one_line(
    workplace: Workplace, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    damage(model / name)

    refusal = workplace.refusal(model=model)

    assert refusal.exit_code in (2, 4), refusal.output[-2000:]
    assert "Traceback" not in refusal.output
    assert "error: " in refusal.output


def no_json(constant: str) -> None:
    """RFC 8259 has no NaN and no Infinity."""
    raise AssertionError(constant)


def test_m1_weights_that_are_no_numbers_are_an_error_and_never_nan_in_json(
    workplace: Workplace, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: torch.full_like(x, float("nan")) for name, x in weights.items()}, model / "model.safetensors"
    )
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "logprobs": 2}

    with workplace.serve(model=model) as server:
        whole = server.post("/v1/completions", body)
        streamed = server.post("/v1/completions", {**body, "stream": True})

        assert whole.status_code == 500, whole.text
        assert '"error"' in streamed.text
        for line in (whole.text, *streamed.text.replace("data: ", "").splitlines()):
            assert not line or line == "[DONE]" or json.loads(line, parse_constant=no_json)
        assert eventually(server.is_idle)
        assert "Traceback" not in server.log
