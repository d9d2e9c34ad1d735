"""Devices: one folder each (probe, compiler, runtime)."""
