"""The HTTP server: OpenAI's protocol in front of the engine. Online: it never compiles."""
