"""Tuning: how many sequences, threads and which graph serve a model best on this machine.

`genserve tune` measures a logits stage as a server would run it, chooses, and writes what it has chosen
into the configs of the model's stages.
"""
