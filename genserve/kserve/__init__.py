"""KServe: the part of KServe v2 and Triton's extensions that HTTP and gRPC share."""
