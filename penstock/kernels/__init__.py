"""The ops' mathematics, on arrays. Kernels know shapes and formats, never plans, tasks or files."""
