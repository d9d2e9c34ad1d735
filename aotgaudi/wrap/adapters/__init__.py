"""One adapter for each server that we wrap. Adapters describe servers; they neither start nor import them."""
