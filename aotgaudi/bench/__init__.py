"""Measurements of processes on this machine, from the outside, as a user would take them."""
