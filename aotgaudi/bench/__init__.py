"""Measures on this machine what a user would measure: processes, from the outside. Neither builds nor serves."""
