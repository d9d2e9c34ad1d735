"""Examines what a machine can build and serve, and which lines of the contract with Gaudi's bridge hold there.

`machine` examines any machine. `hpu` examines a Gaudi.
"""
