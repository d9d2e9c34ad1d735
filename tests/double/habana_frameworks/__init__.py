"""A double of Intel's plugin of torch for Gaudi: it behaves as public sources document, on any CPU, and runs nothing fast.

Behaviours have numbers (D-nn), which tests/double/README.md lists with their sources. Settings are environment
variables that begin with ``AOTGAUDI_DOUBLE_``: see `habana_frameworks.bridge.profile` and `.faults`.
"""

DOUBLE = True
