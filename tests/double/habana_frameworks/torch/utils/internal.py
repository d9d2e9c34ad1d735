"""Which mode this is."""

import functools

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.profile import PROFILE


@functools.cache
def is_lazy() -> bool:
    """Returns whether graphs are gathered until a step is marked; anything but "0" says so."""
    return flags.text("PT_HPU_LAZY_MODE", "1" if PROFILE.lazy_by_default else "0") != "0"
