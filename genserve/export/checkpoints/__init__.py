"""Checkpoints: reads trained models from folders, files and the hub."""
