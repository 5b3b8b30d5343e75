"""Engine: sequences of tokens, generated in batches. No text, no web, no runtime."""
