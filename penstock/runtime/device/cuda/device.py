"""Makes a GPU a device of the runtime: memory with a hard cap, three streams, and tasks that are enqueued without
waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import DeviceFailed, DoesNotFit
from penstock.graph.tasks import Slot, Task
from penstock.kernels.gpu.choose import Kernels, choose
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding
from penstock.runtime.device import LANES, Underway
from penstock.runtime.device.cuda.bind import TorchBinding
from penstock.runtime.device.cuda.graphs import Graphs
from penstock.runtime.device.cuda.lanes import AtOnce, CudaStreams, failed
from penstock.runtime.device.cuda.pinned import Pinned
from penstock.spec.places import GPU, HOST, is_device
from penstock.spec.plan import Plan
from penstock.units import MIB, format_bytes

# The part of the context that torch takes for itself: cuBLAS's workspaces (32 MiB a stream on large cards), and what
# torch rounds allocations up to.
WORKSPACE_BYTES = 96 * MIB
# What the driver takes for recorded graphs beside that: 450 of them took 44 MiB of an H200's memory.
GRAPHS_BYTES = 64 * MIB


class TorchDevice:
    """A device of torch. `limit_bytes`: of the device's memory, with the `context_bytes` that the driver's context
    takes. `graphs`: whether tasks that come again are recorded. `kernels`: these instead of those that suit the
    device."""

    name = "cuda"

    def __init__(
        self, device: torch.device, limit_bytes: int, context_bytes: int, *, graphs: bool = True,
        kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        self._device, self._limit_bytes, self._context_bytes = device, limit_bytes, context_bytes
        self._graphs_wanted = graphs and device.type == "cuda"
        chosen, why = choose(device)
        self._kernels = kernels or chosen
        name = torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else "the processor"
        self.description = f"{name} through torch {torch.__version__.split('+')[0]}; {why}"
        self._memory: dict[str, Tensor] = {}
        self._taken_bytes = 0
        self._pinned = Pinned(device)
        self._lanes: CudaStreams | AtOnce = AtOnce() if device.type == "cpu" else CudaStreams(device, LANES)
        self._binding: TorchBinding | None = None
        self._graphs: Graphs | None = None
        if device.type == "cuda":  # memory that an earlier device of this process left is not ours, nor is its peak
            _give_back()
            torch.cuda.reset_peak_memory_stats(device)
        self._cap()

    def time_tasks(self, on: bool) -> None:
        self._lanes.timed = on

    @property
    def peak_bytes(self) -> int:
        if self._device.type == "cpu":
            return self._taken_bytes + self._context_bytes
        module: Any = torch.get_device_module(self._device)
        return int(module.max_memory_reserved(self._device)) + max(0, self._context_bytes - WORKSPACE_BYTES)

    @property
    def borrowed_bytes(self) -> int:
        return self._taken_bytes if self._device.type == "cpu" else 0

    @property
    def note(self) -> str:
        return self._pinned.note or (self._graphs.note if self._graphs is not None else "")

    def allocate(self, arena: str, nbytes: int) -> None:
        """Memory of the device. Raises DoesNotFit beyond its limit, DeviceFailed where the device has no more."""
        need = self._context_bytes + self._taken_bytes + nbytes
        if need > self._limit_bytes:
            raise DoesNotFit(
                f"device memory of {format_bytes(self._limit_bytes)} is too little: with {arena} it would be"
                f" {format_bytes(need)}",
                tier=GPU.executor, need_bytes=need, have_bytes=self._limit_bytes, minimum_bytes=need,
            )  # fmt: skip
        try:
            self._memory[arena] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise DeviceFailed(
                f"the device has no {format_bytes(nbytes)} left for {arena}: another process has taken memory since it "
                f"was planned ({failed(error).message})"
            ) from None
        self._taken_bytes += nbytes

    def attach(self, plan: Plan, arenas: Arenas, cpu: Callable[[], Binding]) -> None:
        memory = dict(self._memory)
        for arena in plan.arenas:
            if arena.tier == HOST:
                whole = arenas.whole(arena.name)
                memory[arena.name] = torch.from_numpy(whole)
                if _crosses(plan, arena.name):
                    self._pinned.register(arena.name, whole.ctypes.data, len(whole))
        self._binding = TorchBinding(plan, memory, self._device, self._kernels, self._pinned.cut)
        # A copy of memory that is not pinned cannot be recorded.
        self._graphs = Graphs(self._binding, self._graphs_wanted and not self._pinned.note)
        if self._device.type != "cpu":  # the tables were made on this thread's stream, and the lanes have their own
            module: Any = torch.get_device_module(self._device)
            module.current_stream(self._device).synchronize()

    def upload(self, target: Slot, source: NDArray[np.uint8]) -> Underway:
        """As `Device.upload`. `source`: uint8 [target's bytes]."""
        device_bytes, host_bytes = self._memory[target.arena][target.lo : target.hi], torch.from_numpy(source)
        return self._lanes.enqueue(
            GPU.to_device, lambda: _ignored(device_bytes.copy_(host_bytes, non_blocking=True)), ()
        )

    def start(self, task: Task, after: Sequence[Underway]) -> Underway:
        assert self._binding is not None and self._graphs is not None, "a device computes when it is attached"
        binding, graphs, lane = self._binding, self._graphs, task.lanes[0]
        if lane == GPU.kernels:
            return self._lanes.enqueue(lane, lambda: graphs.run(task), after)
        return self._lanes.enqueue(lane, lambda: binding.run(task), after)

    def begin(self) -> None:
        """A pass starts: its tasks may fill tables."""
        if self._binding is not None:
            self._binding.begin()

    def forget(self) -> None:
        self._wait()
        if self._graphs is not None and self._binding is not None:
            self._graphs.forget()
            self._binding.forget()

    def close(self) -> None:
        self._wait()
        self._pinned.close()  # while the arenas are still mapped
        if self._binding is not None:
            self._binding.close()
        self._graphs = self._binding = None
        self._memory.clear()
        if self._device.type == "cuda":
            _give_back()
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def _wait(self) -> None:
        """Waits for this device's own lanes, not for the whole card."""
        if isinstance(self._lanes, CudaStreams):
            for lane in LANES:
                with suppress(RuntimeError):  # the one who waited for the task that failed has the error
                    self._lanes.stream(lane).synchronize()

    def _cap(self) -> None:
        """Has torch itself refuse to take more than the user allowed."""
        if self._device.type != "cuda":
            return
        _, total = torch.cuda.mem_get_info(self._device)
        # torch may also take its workspaces and what it rounds up, which the context's bytes count.
        share = max(0, self._limit_bytes - self._context_bytes + WORKSPACE_BYTES) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)


def _give_back() -> None:
    """Gives the driver back what torch holds and nobody uses. That includes cuBLAS's workspaces: torch keeps 32 MiB for
    each stream that ever multiplied, also when the stream is gone."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _crosses(plan: Plan, arena: str) -> bool:
    """Whether bytes of an arena of the host cross the link. Those of its ring, scratch, window and staging are for the
    CPU alone, and those of its caches too unless the device has caches above them."""
    if arena == f"{HOST}.cache":
        return any(is_device(cache.executor) for cache in plan.caches)
    return arena not in (f"{HOST}.ring", f"{HOST}.scratch", f"{HOST}.window", f"{HOST}.staging")


def _ignored(_: object) -> None:
    """Drops the result of a call, so that a lambda returns None."""
