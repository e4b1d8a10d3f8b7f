"""Arrays in, arrays out. Kernels know shapes and formats, never plans, tasks or files."""
