"""``aotgaudi generate``: answers a file of requests, in the form of OpenAI's batch API."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from aotgaudi.cli.meter import Meter, bar
from aotgaudi.cli.options import json_option, option, options_of, path_option
from aotgaudi.cli.served_model import ModelChoice, begun_engine, parsers_options, require_packages
from aotgaudi.cli.serving_options import LOG_FORMAT, acceptance_options
from aotgaudi.cli.show import emit
from aotgaudi.errors import RefusedRequestsError
from aotgaudi.server.options import LogFormat, ReplyParsers
from aotgaudi.spec.policy import Policy

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.server.batch import BatchProgress
    from aotgaudi.server.batch_files import AnswerFile, RequestFile

_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"),
    *("/tokenize", "/detokenize"),
)


@dataclass(frozen=True, kw_only=True)
class _Generating(ModelChoice):
    policy: Policy | None = "throughput"
    outside: Literal["refuse", "chunk", "pad-up"] | None = option(
        "What the warm entries of a part do not cover: refuse it; cut prompts into shorter chunks; start only if larger "
        "entries cover all.",
        default="refuse",
    )


@dataclass(frozen=True, kw_only=True)
class _Log:
    log_format: LogFormat = "text"


@click.command()
@path_option("--bundle", required=True, metavar="DIR", help="What `build` sealed.")
@path_option(
    "-i",
    "--input",
    "source",
    required=True,
    metavar="FILE",
    help="Requests, one a line: custom_id, method, url and body, as of OpenAI's batches.",
)
@path_option(
    "-o",
    "--output",
    "out",
    required=True,
    metavar="FILE",
    help="Where answers are appended, one a line. Requests that have one there are not asked again.",
)
@options_of(_Generating, "generating")
@parsers_options()
@acceptance_options
@options_of(_Log, "log", log_format=LOG_FORMAT)
@json_option("Print what was done as JSON.")
@click.pass_context
def generate(  # noqa: PLR0913 - one argument for each group of options
    context: click.Context,
    *,
    bundle: Path,
    source: Path,
    out: Path,
    generating: _Generating,
    parsers: ReplyParsers,
    acceptance: TrustPolicy,
    log: _Log,
    as_json: bool,
) -> None:
    """Answer a file of requests from a verified BUNDLE, as `serve --require-warm` would, without a server.

    Stop it as you like: the same command goes on from there. Exits with 0 if every request has an answer with status 200,
    with 8 if some have another.
    """
    from aotgaudi.bundle.kind import is_capture
    from aotgaudi.phases import Phases, since_process_start
    from aotgaudi.server.batch_files import AnswerFile, RequestFile

    phases = Phases(since_process_start())
    if is_capture(bundle):
        raise click.UsageError("--bundle is a capture, which its own server runs: `aotgaudi run`")
    _ = generating.given_model
    require_packages()
    requests = RequestFile(source, _PATHS)
    with AnswerFile.open(out, requests) as answers:
        num_before = len(answers.done)
        done = None
        if num_before < len(requests):
            context.call_on_close(gc.enable)
            done = _answer(bundle, generating, parsers, acceptance, log.log_format, phases, requests, answers)
    counts = {
        "output": str(out),
        "requests": len(requests),
        "answered_before": num_before,
        "errors": answers.num_errors,
        "generated_tokens": done.num_tokens if done else 0,
        "seconds": round(done.seconds, 3) if done else 0.0,
    }
    emit(counts, as_json, _summary(counts))
    if answers.num_errors:
        raise RefusedRequestsError(
            f"{out}: {answers.num_errors} of {len(requests)} answers are errors: see their response.status_code"
        )


def _answer(
    bundle: Path,
    generating: _Generating,
    parsers: ReplyParsers,
    acceptance: TrustPolicy,
    log_format: LogFormat,
    phases: Any,
    requests: RequestFile,
    answers: AnswerFile,
) -> BatchProgress:
    with begun_engine(generating, bundle, acceptance, phases, log_format) as (process, threads):
        from aotgaudi.server.batch import run_batch
        from aotgaudi.server.launch import StartOptions

        logging.getLogger().setLevel(logging.WARNING)
        options = StartOptions(
            require_warm=True,
            threads=threads,
            served_model_names=generating.names,
            chat_template=generating.chat_template,
            parsers=parsers,
        )
        with Meter(_generating_bar, is_told_at_once=False) as meter:
            return run_batch(options, process, phases, requests, answers, lambda done: _show(meter, done))


def _show(meter: Meter, done: BatchProgress) -> None:
    speed = done.num_tokens / done.seconds if done.seconds else 0.0
    errors = f", {done.num_errors} errors" if done.num_errors else ""
    meter.update(
        f"[{done.num_done}/{done.num_total}] {speed:,.0f} tokens/s{errors}",
        done.num_done,
        done.num_total,
        is_last=done.num_done == done.num_total,
        said=f"{speed:,.0f} tokens/s{errors}",
    )


def _generating_bar() -> Bar:
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return bar(
        "answering",
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )


def _summary(counts: dict[str, Any]) -> str:
    before = f", {counts['answered_before']:,} of them before" if counts["answered_before"] else ""
    errors = f", {counts['errors']:,} with an error" if counts["errors"] else ""
    return (
        f"answered   {counts['output']}: {counts['requests']:,} requests{before}{errors}; "
        f"{counts['generated_tokens']:,} tokens in {counts['seconds']:.1f} s"
    )
