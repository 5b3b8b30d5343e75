"""Planner: simulates a fleet of replicas under a load, and finds how many of them meet its targets."""
