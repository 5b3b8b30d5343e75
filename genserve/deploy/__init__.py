"""Deployments on several machines: routing, replicas, failover, and the Ray Serve application."""
