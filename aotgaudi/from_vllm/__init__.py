"""``--from-vllm``: a spec from the command and the environment of a vLLM server."""
