"""Bytes at rest: checkpoints in, packed models out. No torch; `packed` needs not even numpy."""
