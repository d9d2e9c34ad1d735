"""The server's pages for people: the API's description and the dashboard."""
