"""Calls: how an ingress calls the replicas of a model, over connections of their own."""
