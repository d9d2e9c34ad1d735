"""Other people's servers: reading their commands, capturing and proving their caches, running and watching them."""
