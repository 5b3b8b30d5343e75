"""Adapters: LoRA adapters, as models of a repository or merged into a checkpoint."""
