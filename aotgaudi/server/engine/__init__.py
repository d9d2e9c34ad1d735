"""The engine in a process of its own, so that neither it nor what speaks HTTP waits for the other's interpreter."""
