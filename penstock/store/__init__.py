"""Bytes at rest: checkpoints in, packed models out. No torch; `packed` does not even need numpy."""
