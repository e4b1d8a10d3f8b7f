"""Every op in numpy float32: the definition that the fast kernels are compared with.

Granules are computed one at a time, each by the same calls on the same shapes. So results do not depend on where units
are cut, to the bit. All temporaries come from the plan's scratch arena.
"""
