"""Reads models that lie in GGUF files: what a file holds, which model that is, its tokenizer."""
