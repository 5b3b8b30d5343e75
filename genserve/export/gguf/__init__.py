"""GGUF: reads the checkpoints and adapters of llama.cpp."""
