"""Devices: one folder each (probe, compiler, runtime), and who may reach which half."""
