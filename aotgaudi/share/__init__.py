"""Where stores and bundles are shared: directories, object stores and registries; moving many objects to and from them."""
