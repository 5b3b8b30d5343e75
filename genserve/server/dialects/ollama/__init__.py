"""Ollama: generate, chat and its models."""
