"""A wrapped server, started from its sealed caches and watched as long as it runs; it builds nothing and loads nothing."""
