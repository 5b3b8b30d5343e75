"""Graphs: write a decoder as ONNX or TorchScript."""
