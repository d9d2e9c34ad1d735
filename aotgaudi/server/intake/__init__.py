"""Reading what clients send, in processes of its own."""
