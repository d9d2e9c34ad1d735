"""Gaudi without a device: cards and software of a machine, the effect of its environment on code, and recipes.

docs/reference/hpu-contract.md says what the bridge (Intel's plugin of torch for Gaudi) promises. The numbers K-nn and H-nn
in this package refer to it. Nothing here imports torch or habana_frameworks, or acquires a card.
"""
