"""The schedule as data: ops, tasks, the lowering that orders them, arenas, verify, timeline."""
