"""Ray: the deployment as an application of Ray Serve."""
