"""The replica: one model of a repository in a process of its own."""
