"""A model, its bundle, and `aotgaudi` as processes: what the end-to-end tests are made of."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

import aotgaudi
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import BundleIndex, load_index
from aotgaudi.bundle.model_directory import bind_model
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry
from aotgaudi.store.cas import object_path
from tests.ports import free_port

MAX_MODEL_LEN = 64
VOCAB_SIZE = 512
START_TIMEOUT_SECONDS = 90.0
STOP_TIMEOUT_SECONDS = 60.0
REQUEST_TIMEOUT_SECONDS = 240.0
PACKAGE_ROOT = str(Path(aotgaudi.__file__).parents[1])
"""Children run elsewhere, and must run the same code whether or not it is installed."""

EVERYTHING = "presence_penalty = 0.5, constraints = true"
SPEC = f"""\
# Small, but with everything: chunked prompts, two rows a step, preemption (6 blocks for two sequences of 4),
# defragmentation.
schema = "aotgaudi.spec/1"

[model]
name = "e2e-llama"
dtype = "float32"
config = "model/config.json"

[limits]
max_num_seqs = 2
max_num_batched_tokens = 16
max_model_len = {MAX_MODEL_LEN}
block_size = 16
num_blocks = 6

[sampler]
settings = [
    {{ temperature = 0.0, top_p = 1.0, top_k = 0 }},
    {{ temperature = 0.7, top_p = 0.9, top_k = 20, min_p = 0.05, num_logprobs = 5, {EVERYTHING} }},
]

[defrag]
enabled = true
threshold = 1
padded_swaps = [4]

[target]
backend = "cpu"
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = "the quick brown fox jumps over the lazy dog while seven wizards quietly mix a jar of potion"


def make_model(folder: Path) -> None:
    """Writes a two-layer Llama with random weights, as `transformers` saves it, and a tokenizer for it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(20)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # Wide enough that the likeliest token is so by a margin.
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    # Every id that the model can answer is some text, so that different answers are different texts.
    tokenizer.add_tokens([f"~{number}" for number in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def environment(cache: Path, **changes: str) -> dict[str, str]:
    """What a child process gets: nothing of the caller's settings of aotgaudi, one thread, no network."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AOTGAUDI_") and name != "PYTHONPATH"
    }
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}
    return {**inherited, **fixed, "PYTHONPATH": PACKAGE_ROOT, **changes}


def command_line(*arguments: str | Path) -> list[str]:
    """``aotgaudi ARGUMENTS``, run by this interpreter."""
    return [sys.executable, "-m", "aotgaudi", *map(str, arguments)]


def eventually(condition: Callable[[], bool], timeout_seconds: float = 15.0) -> bool:
    """Returns whether `condition` came true before the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@dataclass(frozen=True)
class Workplace:
    """Where the processes of one test run work, and what they work on."""

    folder: Path
    spec: Path
    model: Path
    store: Path
    bundle: Path

    def run(
        self, *arguments: str | Path, timeout_seconds: float = 600, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``aotgaudi ARGUMENTS`` to its end; `changes` go to its environment."""
        return subprocess.run(
            command_line(*arguments),
            cwd=self.folder,
            env=environment(self.folder / "cache", **changes),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )

    def serve(
        self,
        *options: str | Path,
        bundle: Path | None = None,
        model: Path | None = None,
        strict: bool = True,
        prefix: Sequence[str] = (),
        **changes: str,
    ) -> Server:
        """A server that is started by entering it. Options as on the command line; `prefix` is a command that runs it."""
        command = self._serve_command(bundle, model, "0", ("--drain-delay", "0", *options), strict)
        return Server([*prefix, *command], environment(self.folder / "cache", **changes), self.folder)

    def refusal(
        self,
        *options: str | Path,
        bundle: Path | None = None,
        model: Path | None = None,
        port: int | None = None,
        strict: bool = True,
        prefix: Sequence[str] = (),
    ) -> Refusal:
        """What a server says that should not come up: see `Refusal`."""
        asked = free_port() if port is None else port
        command = self._serve_command(bundle, model, str(asked), options, strict)
        cpu_before = _child_cpu_seconds()
        process = subprocess.Popen(
            [*prefix, *command],
            cwd=self.folder,
            env=environment(self.folder / "cache"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            has_listened = _watch_port(process, asked if port is None else None)
            output, _ = process.communicate(timeout=START_TIMEOUT_SECONDS)
        finally:
            process.kill()
        return Refusal(process.returncode, output, _child_cpu_seconds() - cpu_before, has_listened)

    def _serve_command(
        self,
        bundle: Path | None,
        model: Path | None,
        port: str,
        options: tuple[str | Path, ...],
        strict: bool,
    ) -> list[str]:
        where = ("--bundle", bundle or self.bundle, "--model", model or self.model, "--port", port)
        return command_line("serve", *where, *options, *(["--require-warm"] if strict else []))


@dataclass(frozen=True)
class Refusal:
    """How a start ended: exit code, what was printed, CPU seconds, and whether the port ever answered.

    A start is one thread that never waits, so its CPU seconds are what it takes on a quiet machine.
    """

    exit_code: int
    output: str
    cpu_seconds: float
    has_listened: bool


def _child_cpu_seconds() -> float:
    """The CPU seconds of all child processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch_port(process: subprocess.Popen[str], port: int | None) -> bool:
    """Knocks at the port until the process ends; returns whether somebody opened (then kills the process)."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if port is not None and _answers(port):
            process.kill()
            return True
        time.sleep(0.01)
    return False


def _answers(port: int) -> bool:
    with socket.socket() as knocking:
        knocking.settimeout(0.5)
        return knocking.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """``aotgaudi serve`` as a process. Entered, it is ready; left, it has been told to stop and has ended."""

    _READY = re.compile(r"ready in [0-9.]+ s: (http://127\.0\.0\.1:\d+)")

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        folder: Path,
        start_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self._command, self._env, self._folder = command, dict(env), folder
        self._start_seconds = start_seconds
        self.log_path = folder / f"serve-{time.monotonic_ns()}.log"
        self.base_url = ""

    def __enter__(self) -> Server:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self.base_url = self._wait_ready()
            self.client = httpx.Client(base_url=self.base_url, timeout=REQUEST_TIMEOUT_SECONDS)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        exit_code = self.stop()
        if kind is None:
            assert exit_code == 0, self.log

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (found,) = (
            child
            for child in psutil.Process(self.process.pid).children()
            if "aotgaudi.server.engine.main" in child.cmdline()
        )
        return found

    @property
    def model_name(self) -> str:
        """The name under which requests may ask for the model."""
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    def stop(self) -> int:
        """Asks the server to stop as `kill` does. Returns its exit code, also when it has ended before."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Posts JSON."""
        return self.client.post(path, json=body)

    def complete(self, prompt: object, **parameters: Any) -> dict[str, Any]:
        """Returns the JSON of a completion, which must succeed. Greedy unless told otherwise."""
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **parameters})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that carry `labels`."""
        samples = [
            sample.value
            for family in text_string_to_metric_families(self.client.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert samples, f"no sample of {name} {labels}"
        return sum(samples)

    def is_idle(self) -> bool:
        """Whether no request waits or runs, and no KV block is held."""
        names = ("aotgaudi_requests_running", "aotgaudi_requests_waiting", "aotgaudi_kv_blocks_used")
        return all(self.metric(name) == 0 for name in names)

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := self._READY.search(self.log):
                assert httpx.get(f"{found[1]}/ready").status_code == 200
                return found[1]
            time.sleep(0.02)
        raise AssertionError(f"the server is not ready (exit code {self.process.poll()}):\n{self.log}")


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to ``[DONE]``, which must come."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


@contextmanager
def streaming(server: Server, body: Mapping[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """Posts a completion that streams; yields its events."""
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        yield events_of(response.iter_lines())


# Bundles


def copy_bundle(bundle: Path, to: Path) -> Path:
    """Copies a bundle, writable."""
    shutil.copytree(bundle, to)
    for path in to.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to


def own_object(bundle: Path, entry: Entry) -> Path:
    """The file of an artifact that this entry needs and no other."""
    opened = open_bundle(bundle)
    receipt = opened.receipt

    def artifacts(program_of: str) -> set[Digest]:
        units = opened.program(program_of).unit_keys()
        return {digest for key in units for digest in receipt.units[key].artifact.values()}

    program = receipt.programs[entry.id]
    others = [other for other, text in receipt.programs.items() if text != program]
    own = artifacts(entry.id).difference(*map(artifacts, others))
    return object_path(bundle, min(own, key=str))


def reseal(bundle: Path, change: Callable[[Receipt], Receipt]) -> None:
    """Changes a bundle's receipt, and the index with it, as somebody would who knows the format."""
    opened = open_bundle(bundle)
    receipt = change(opened.receipt).dumps()
    index: BundleIndex = load_index(opened.index_bytes)
    (bundle / "receipt.json").write_bytes(receipt)
    changed = index.model_copy(update={"receipt": str(Digest.of(receipt))})
    (bundle / "aotgaudi.bundle.json").write_bytes(changed.dumps())


def bind(bundle: Path, model: Path) -> None:
    """Binds a copied bundle to a model directory."""
    spec = open_bundle(bundle).manifest.spec
    reseal(bundle, lambda receipt: receipt.model_copy(update={"model": bind_model(model, spec)}))


def store_without(store: Path, lost: Iterable[Path], to: Path) -> Path:
    """A copy of a store that lacks the objects of the files `lost`, and whatever the compiler remembered."""
    shutil.copytree(store, to, ignore=shutil.ignore_patterns("toolcache", "logs", "tmp"))
    for path in lost:
        (found,) = to.rglob(path.name)
        found.unlink()
    return to
