"""Measures processes on this machine from the outside, as a user would."""
