"""Routes: one file per dialect."""
