"""Whether a guest may be started from a bundle: the bundle's bytes, then the launch. Starts nothing, and writes nothing.

What is refused is refused here, in a fraction of a second: this module needs nothing of what watches a guest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.launch import Launch
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.errors import AotGaudiError, NotWarmError, TargetError
from aotgaudi.wrap.interpreter import Asking
from aotgaudi.wrap.launch import Found, describe_here
from aotgaudi.wrap.launch_comparison import EXIT_OTHER_MACHINE, compare
from aotgaudi.wrap.run_options import Listen, Policy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What ``aotgaudi run`` is asked for.

    Attributes:
        bundle: Of a capture.
        words: The guest's command; empty for the sealed one.
        extra_words: Words behind that, which must change no code.
        environ: The environment that the guest would have without us.
        acceptance: Which bundles may be used.
        policy: What is demanded.
        exercises: Whether the sealed exercise is replayed before ready.
        repairs: Whether the sealed repairs are made.
        root: Where the guest sees its files; None: where it saw them in the build.
        listen: Where we answer.
        began: `time.monotonic` of the process's start.
        asking: The interpreter of `words`, if it has been asked already.
    """

    bundle: Path
    environ: Mapping[str, str]
    words: tuple[str, ...] = ()
    extra_words: tuple[str, ...] = ()
    acceptance: TrustPolicy = ANY_BUNDLE
    policy: Policy = field(default_factory=Policy)
    exercises: bool = True
    repairs: bool = True
    root: Path | None = None
    listen: Listen = field(default_factory=Listen)
    began: float = 0.0
    asking: Asking | None = None


@dataclass(frozen=True)
class Prepared:
    """What may be started.

    Attributes:
        bundle: Opened: its signature held, if that was demanded, and launch and receipt are those that it names.
        found: The command.
        here: Its launch.
        why_cold: Why it must start cold, in one sentence; empty where it need not.
    """

    bundle: Bundle
    found: Found
    here: Launch
    why_cold: str

    @property
    def launch(self) -> Launch:
        """What is established in the place: the sealed launch, or what is asked for where that starts cold."""
        return self.here if self.why_cold else self.bundle.launch


def prepare(options: RunOptions) -> Prepared:
    """Opens the bundle, and compares what is asked for with what was sealed.

    Raises:
        CorruptError, UntrustedError: the bundle's bytes are not what was sealed, or not to be trusted.
        NotWarmError, TargetError: the launch, or this machine, is another one, and may not start cold.
        SpecError, StoreError: the command, or the bundle, cannot be used.
    """
    bundle = open_bundle(options.bundle, options.acceptance)
    found, here, why_cold = _compared(bundle, options)
    return Prepared(bundle, found, here, why_cold)


def _compared(bundle: Bundle, options: RunOptions) -> tuple[Found, Launch, str]:
    """Returns what the command starts, as a launch, and why that must start cold: empty where it need not.

    Raises NotWarmError or TargetError where it must not start cold.
    """
    sealed = bundle.launch
    words = (*(options.words or sealed.words), *options.extra_words)
    root = sealed.place.root if options.root is None else str(options.root)
    found, here = describe_here(sealed, words, options.environ, root=root, asking=options.asking)
    if not options.repairs:
        here = here.model_copy(update={"repairs": ()})
    comparison = compare(sealed, here, found.adapter.variable_rules)
    why, exit_code = comparison.sentence(), comparison.exit_code
    if comparison.is_same and root != sealed.place.root:
        why, exit_code = f"--root is {root}, and the sealed files hold the path {sealed.place.root}", 3
    elif comparison.is_same:
        return found, here, ""
    if options.policy.require_warm:
        error: type[AotGaudiError] = TargetError if exit_code == EXIT_OTHER_MACHINE else NotWarmError
        raise error(f"the guest would not be warm: {why}")
    _log.warning("starting cold, in a private cache: %s", why)
    return found, here, why
