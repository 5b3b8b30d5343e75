"""OpenAI: chat completions, completions and responses."""
