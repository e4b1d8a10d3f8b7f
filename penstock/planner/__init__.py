"""Decides where every byte of a model lives, and predicts the speed. It imports neither torch nor numpy, and reads no
weights."""
