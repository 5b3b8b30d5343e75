"""Pages: the chat, the dashboard, the documentation of the API, and health."""
