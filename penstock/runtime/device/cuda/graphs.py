"""Records tasks that come again as CUDA graphs, and launches each by one call.

A decode step of a model that fits is a few hundred kernels of some microseconds each. To launch them one by one would
take longer than to run them: beside an H200 a call took 124 µs, and a replay takes some 10 µs, of a single call too.
The lowering says which earlier task a task is like (`Task.like`). The first run of such tasks compiles kernels, the
second one is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch

from penstock.graph.tasks import Task
from penstock.runtime.device.cuda.bind import TorchBinding

# Graphs that are kept. Where the CPU takes a share of each FFN, a pass has one or two tasks a layer, and each comes in
# some shapes. Where weights are lifted there is a task for each lift: 225 a pass, for 8B within 2 GB.
_KEPT = 640  # of some 100 KiB each (`device.GRAPHS_BYTES`)


class Graphs:
    """Recorded tasks. `run` enqueues a task on the current stream: as a replay where it can, else call by call. `on`:
    whether tasks are recorded at all. `note`: why recording was given up, or "". `replays`: how many so far.

    All graphs share one pool of memory: they run on one stream, and no memory of a task is used after it."""

    def __init__(self, binding: TorchBinding, on: bool) -> None:
        self._binding, self._on = binding, on
        self._pool = torch.cuda.graph_pool_handle() if on else None
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self.replays, self.note = 0, ""

    def run(self, task: Task) -> None:
        """Enqueues the task on the current stream."""
        self._binding.prepare(task)
        if not self._on or task.like < 0:
            self._binding.run(task)
            return
        graph = self._kept.get(task.like)
        if graph is None:
            try:
                graph = self._kept[task.like] = self._record(task)
            except RuntimeError as error:  # some op cannot be recorded: call by call is slower, and right all the same
                self._on, self.note = False, f"steps are not recorded, so slower: {str(error).splitlines()[0]}"
                self._binding.run(task)
                return
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(task.like)
        graph.replay()
        self.replays += 1

    def forget(self) -> None:
        """Task ids start over: all graphs are dropped. None of them may be running."""
        self._kept.clear()

    def _record(self, task: Task) -> Any:
        """Records the task as a graph. Other threads may go on launching on other streams meanwhile. This does not use
        `torch.cuda.graph`, which first waits for the whole device and collects garbage."""
        graph = torch.cuda.CUDAGraph()
        self._binding.forget_turns()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._binding.run(task)
        except BaseException:
            with suppress(RuntimeError):  # ending an invalid recording fails too; the first error tells the cause
                graph.capture_end()
            raise
        finally:
            self._binding.forget_turns()
        graph.capture_end()
        return graph
