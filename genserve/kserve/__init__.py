"""KServe: what the HTTP and gRPC faces of the KServe v2 protocol and Triton's extensions share."""
