"""Where stores and bundles are shared: directories and object stores, and moving many objects to and from them."""
