"""Decides which shapes are enumerated, which entry runs a step, and whether every step has one."""
