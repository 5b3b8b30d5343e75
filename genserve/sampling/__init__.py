"""Sampling: the parameters of a request, and the samplers that turn rows of logits into tokens."""
