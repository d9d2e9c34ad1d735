"""What is compiled: steps of transformers models, the sampler, the KV swap; and programs, which run them."""
