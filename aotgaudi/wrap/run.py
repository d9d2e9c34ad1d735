"""From a bundle and a command to a warm server. The order of the steps is the guarantee, and this page shows all of it.

1. If trusted keys are given, the bundle's signature is verified. Then its index is read, and then launch and receipt, which
   must be those that the index names.
2. The requested launch is compared with the sealed one: command, variables, model, versions, machine. A difference is
   reported before anything in the cache is read.
3. Every file is hashed while it is copied into a private directory. The server loads exactly the bytes that were hashed.
4. The server starts there, with an agent in each of its processes.
5. It is watched, sent the warm-up requests, and judged. Only then is it ready.

We interpret nothing in the bundle before its signature is verified, and never anything in the cache.

Steps 1 and 2 start nothing and write nothing. Refusals come from them and take a fraction of a second, so this module
imports nothing that watches a server.
"""

from __future__ import annotations

import logging

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.wrap.launch import describe_here
from aotgaudi.wrap.launch_comparison import Checked, compare
from aotgaudi.wrap.run_options import RunOptions
from aotgaudi.wrap.signals import Signals

_log = logging.getLogger(__name__)


def check(options: RunOptions) -> Checked:
    """Opens the bundle, and compares the requested launch with the sealed one.

    Raises:
        CorruptError, UntrustedError: The bundle's bytes are not what was sealed, or not to be trusted.
        NotWarmError, TargetError: The launch or this machine differs from the sealed one, and may not start cold.
        SpecError, StoreError: The command or the bundle cannot be used.
    """
    bundle = open_bundle(options.bundle, options.acceptance)
    sealed = bundle.launch
    root = sealed.place.root if options.root is None else str(options.root)
    found, here = describe_here(sealed, options.words, options.environ, root=root, asking=options.asking)
    for note in found.notes:
        _log.info("the command: %s", note)
    if not options.repairs:
        here = here.model_copy(update={"repairs": ()})
    comparison = compare(sealed, here, found.adapter.variable_rules)
    why, error = comparison.sentence(), comparison.error
    if comparison.is_same:
        if root == sealed.place.root:
            return Checked(bundle, found, here, why_cold="")
        why = f"--root is {root}, and the sealed files hold the path {sealed.place.root}"
    if options.policy.require_warm:
        raise error(f"the server would not be warm: {why}")
    _log.warning("starting cold, in a private cache: %s", why)
    return Checked(bundle, found, here, why)


def run(options: RunOptions) -> int:
    """Runs a server from a bundle until it ends, and returns its exit code. For the main thread of a separate process.

    Raises:
        CorruptError, UntrustedError: The bundle's bytes are not what was sealed, or not to be trusted.
        NotWarmError, TargetError: The launch or this machine differs from the sealed one, or the server was not warm.
        SpecError, StoreError: The command, the root or the address cannot be used.
        WrappedServerError: The server ended or hung before it was ready.
    """
    with Signals() as signals:
        checked = check(options)  # 1 and 2
        from aotgaudi.wrap.supervise import start  # Only here, so that a refusal need not wait for it.

        return start(options, checked, signals)  # 3 to 5
