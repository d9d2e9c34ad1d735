"""Gaudi without a device: which cards and which software a machine has, what its environment does to code, and recipes.

What the bridge (Intel's plugin of torch for Gaudi) promises is in docs/reference/hpu-contract.md; the numbers K-nn and
H-nn in this package refer to it. Nothing here imports torch or habana_frameworks, or acquires a card.
"""
