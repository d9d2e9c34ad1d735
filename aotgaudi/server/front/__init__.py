"""The socket, the connections and the signals: HTTP below the application."""
