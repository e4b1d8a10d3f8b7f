"""Tasks that come again, recorded once and launched as one (CUDA graphs): a decode step of a model that fits is a few
hundred kernels of some microseconds each, and launching them one by one would take longer than running them.

The lowering says which task a task is like (`Task.like`). Its first run compiles kernels, its second is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch

from penstock.graph.tasks import Task
from penstock.runtime.device.cuda.bind import TorchBinding

# Where the CPU takes a share of each FFN a pass has a task or two a layer, of some shapes each.
_KEPT = 1024
_LEAST_CALLS = 8  # a task of fewer calls gains nothing


class Graphs:
    """`run` does a task on the current stream, by replaying where it can; not `on`, call by call. `note`: why recording
    was given up, or nothing. All share one pool: they run on one stream, and nothing of a task outlives it."""

    def __init__(self, binding: TorchBinding, on: bool) -> None:
        self._binding, self._on = binding, on
        self._pool = torch.cuda.graph_pool_handle() if on else None
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self.replays, self.note = 0, ""

    def run(self, task: Task) -> None:
        self._binding.prepare(task)
        if not self._on or task.like < 0 or len(task.calls) < _LEAST_CALLS:
            self._binding.run(task)
            return
        graph = self._kept.get(task.like)
        if graph is None:
            try:
                graph = self._kept[task.like] = self._record(task)
            except RuntimeError as error:  # some op cannot be recorded: slower, and right all the same
                self._on, self.note = False, f"steps are not recorded, so slower: {str(error).splitlines()[0]}"
                self._binding.run(task)
                return
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(task.like)
        graph.replay()
        self.replays += 1

    def forget(self) -> None:
        """Task ids start over. Nothing of these may be running."""
        self._kept.clear()

    def _record(self, task: Task) -> Any:
        """Other threads may go on launching on other streams meanwhile. Not by `torch.cuda.graph`, which waits for the
        whole device and collects garbage first."""
        graph = torch.cuda.CUDAGraph()
        self._binding.forget_turns()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._binding.run(task)
        except BaseException:
            with suppress(RuntimeError):  # an invalid recording cannot end well; the cause is what counts
                graph.capture_end()
            raise
        finally:
            self._binding.forget_turns()
        graph.capture_end()
        return graph
