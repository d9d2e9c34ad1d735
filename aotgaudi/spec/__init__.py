"""What a person writes: frozen values, read from TOML."""
