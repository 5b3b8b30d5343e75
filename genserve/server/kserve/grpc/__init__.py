"""gRPC: KServe v2 as `inference.GRPCInferenceService`, with the standard health service."""
