"""Folders of models as wide as real ones: the logits here beside those of transformers."""
