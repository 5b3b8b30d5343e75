"""Generation: the token engine. No text, no web, no runtime."""
