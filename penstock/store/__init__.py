"""Reads checkpoints, writes packed models and opens them. Nothing here needs torch; `packed` needs not even numpy."""
