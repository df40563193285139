"""Readers of checkpoint formats (GGUF, Hugging Face, TensorRT-LLM)."""
