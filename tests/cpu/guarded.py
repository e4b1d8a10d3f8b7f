"""Arrays that end where memory ends: whoever reads or writes behind one ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_C = ctypes.CDLL(None, use_errno=True)
_SLOT_ALIGN = 64  # as in graph/kv_layout.py; an arena itself ends at the end of a page


def at_the_end(array: np.ndarray) -> np.ndarray:
    """A copy of an array, at the last multiple of 64 bytes from which it fits before a page that nobody may read."""
    room = -(-max(1, array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    if _C.mprotect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    at = (room - array.nbytes) // _SLOT_ALIGN * _SLOT_ALIGN
    copy = whole[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
