"""Every op of the table on torch tensors: by torch where it does well, by Triton for packed weights and paged KV.

Reading path: `choose` (which implementation a device gets, and why) → `dense`, `attention` (the ops, named as in
`kernels.reference`) → `product` (few rows straight from packed weights, many by widened weights) → the Triton kernels:
`tile_kernels`, `widen_kernels`, `row_kernels`, `turn_kernels`, `attend_kernels`. Modules that end in `_kernels` import
triton, no other does.

All values that change from pass to pass come in small device tensors of fixed shape, and nothing waits for the device.
So a decode step can be recorded in a graph. No kernel is specific to one maker of GPUs.
"""
