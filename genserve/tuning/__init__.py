"""Tuning: finds the batch size, threads and graph with which this machine runs a text model best.

`genserve tune` measures a logits stage as a server would run it, chooses a setting, and writes it into the
configs of the model.
"""
