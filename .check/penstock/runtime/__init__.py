"""Executes tasks and never plans: arenas, movers, the binding of calls to kernels, run and run_serial."""
