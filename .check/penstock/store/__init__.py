"""Bytes at rest: checkpoints in, packed models out (DESIGN §7). No torch; `packed` needs not even numpy."""
