"""The ingress: the single server's application over models that run in replicas."""
