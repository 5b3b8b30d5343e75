"""KServe v2: what its two protocols, HTTP and gRPC, have in common."""
