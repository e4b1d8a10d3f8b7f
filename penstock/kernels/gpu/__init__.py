"""Every op of the table on torch tensors: torch for what it does well, Triton for packed weights and paged KV.

Reading path: `choose` (what runs here, and why) → `dense`, `attention` (the ops, named as in `kernels.reference`) →
`product` (few rows straight from packed weights, many by widened ones) → the Triton kernels: `tile_kernels`,
`row_kernels`, `turn_kernels`, `attend_kernels`. Modules that end in `_kernels` import triton, no other does.

Everything that changes from pass to pass comes in small device tensors of fixed shape, and nothing waits for the
device: a decode step can be recorded in a graph. No kernel is specific to one maker of GPUs.
"""
