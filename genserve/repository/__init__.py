"""Repository: the models of a server, from their folders to the versions that answer."""
