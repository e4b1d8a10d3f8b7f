"""Tasks that come again, recorded once and launched as one (CUDA graphs): a decode step of a model that fits is a few
hundred kernels of some microseconds each, and launching them one by one would take longer than running them.

The lowering says which task a task is like (`Task.like`). Its first run compiles kernels, its second is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from penstock.graph.tasks import Task
from penstock.runtime.device.cuda.bind import TorchBinding

_KEPT = 8
_LEAST_CALLS = 8  # a task of fewer calls gains nothing


class Graphs:
    """`run` does a task on the current stream, by replaying where it can. Without recording (`off`), call by call."""

    def __init__(self, binding: TorchBinding, on: bool) -> None:
        self._binding, self._on = binding, on
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self.replays = 0

    def run(self, task: Task) -> None:
        self._binding.prepare(task)
        if not self._on or task.like < 0 or len(task.calls) < _LEAST_CALLS:
            self._binding.run(task)
            return
        graph = self._kept.get(task.like)
        if graph is None:
            graph = self._kept[task.like] = self._record(task)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(task.like)
        graph.replay()
        self.replays += 1

    def forget(self) -> None:
        """Task ids start over. Nothing of these may be running."""
        self._kept.clear()

    def _record(self, task: Task) -> Any:
        """Other threads may go on launching on other streams meanwhile."""
        graph = torch.cuda.CUDAGraph()
        self._binding.forget_turns()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._binding.run(task)
        self._binding.forget_turns()
        return graph
