"""Drives a GPU through torch. Only this folder and `kernels/gpu` import torch. `device.TorchDevice` is the way in.

Reading path: `device` (memory, lanes, events) → `bind` (calls to kernels) → `graphs` (tasks that come again, recorded)
→ `pinned` (host memory that the link reads directly). Nothing here waits for the whole device. Only `pinned` and
`graphs` are specific to CUDA: tests run the rest on the processor (`torch.device("cpu")`).
"""
