"""D-18: flags at run time."""

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.flags import env_setting
from habana_frameworks.bridge.profile import PROFILE

__all__ = ["env_setting"]


def __getattr__(name: str) -> object:
    """``get_pt_hpu_x()`` and ``set_pt_hpu_x(value)`` for what can be set in this release."""
    verb, _, rest = name.partition("_")
    flag = rest.upper()
    if verb == "get":
        return lambda: flags.is_on(flag)
    if verb == "set" and flag in PROFILE.settable:
        return lambda value: flags.set_flag(flag, value)
    raise AttributeError(name)
