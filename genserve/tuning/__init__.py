"""Tuning: finds the best batch size, number of threads and graph of a text model on this machine.

`genserve tune` measures a logits stage as a server runs it, chooses a setting, and writes it into the
configs of the model.
"""
