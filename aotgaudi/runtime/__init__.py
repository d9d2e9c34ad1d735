"""Online: verified artifacts loaded and bound, and the guard that nothing compiles."""
