"""What a model's text says: reasoning, content and calls of tools, found as the text comes."""
