"""KServe: inference and administration over HTTP and gRPC, with Triton's extensions."""
