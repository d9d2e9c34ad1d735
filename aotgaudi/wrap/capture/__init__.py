"""Offline: runs a server that is not ours, keeps what it compiles, and proves that a second start needs nothing else."""
