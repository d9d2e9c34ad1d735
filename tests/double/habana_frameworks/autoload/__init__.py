"""D-01: what torch calls while it is imported (entry point ``torch.backends``).

Source: ``autoload/__init__.py`` of the bridge.
"""

import os


def __autoload() -> None:
    """Imports the bridge where PT_HPU_AUTOLOAD says so, or, unsaid, unless the mode is lazy."""
    asked = os.environ.get("PT_HPU_AUTOLOAD")
    if asked == "1" or (asked is None and os.environ.get("PT_HPU_LAZY_MODE") != "1"):
        import habana_frameworks.torch
