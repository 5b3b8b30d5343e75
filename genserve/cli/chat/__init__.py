"""Chat: `genserve chat`, the chat in the terminal."""
