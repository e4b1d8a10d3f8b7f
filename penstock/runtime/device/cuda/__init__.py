"""A GPU through torch: the one place besides `kernels/gpu` that imports it. `open_device` is the way in.

Reading path: `device` (memory, lanes, events) → `bind` (calls to kernels) → `graphs` (tasks that come again, recorded)
→ `pinned` (host memory that the link reads directly). Nothing here waits for the whole device, and nothing is specific
to CUDA but `pinned` and `graphs`: on the processor (`torch.device("cpu")`) the rest runs in the tests.
"""
