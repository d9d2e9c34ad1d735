"""The engine: requests in, tokens out. It batches continuously, and the shape of every step has an entry."""
