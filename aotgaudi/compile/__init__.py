"""The offline half: finds what a store lacks, and runs the workers that make it."""
