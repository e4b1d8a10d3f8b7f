"""What a piece of work leaves open behind it: descriptors and threads."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter


def open_now() -> Counter[str]:
    """How often this process has each file, pipe or socket open, and each thread running.

    A test compares what is new, `open_now() - before`, and never totals: what an earlier test left behind may be
    collected in between, so that there are fewer than before.
    """
    gc.collect()
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except FileNotFoundError:  # the descriptor that listed the folder, closed since
            continue
    found.update(f"thread {thread.ident}" for thread in threading.enumerate())
    return found
