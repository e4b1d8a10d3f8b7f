"""Decides where every byte lives and predicts the speed. Pure: no torch, no numpy, no weights."""
