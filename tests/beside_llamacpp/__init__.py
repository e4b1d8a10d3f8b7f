"""GGUF files of models as wide as real ones: the logits here beside llama.cpp's of the same file."""
