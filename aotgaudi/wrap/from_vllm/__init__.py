"""from_vllm."""
