"""Every op in numpy float32: the definition that the fast kernels are held against.

One granule at a time, each with the same calls on the same shapes, so results do not depend on where units
are cut, to the bit. All temporaries come from the plan's scratch arena.
"""
