"""The spec that the user writes: frozen values, read from TOML."""
