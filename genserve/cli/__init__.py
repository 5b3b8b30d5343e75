"""CLI: the command line, `genserve COMMAND`."""
