"""Holds a loaded model, which is the arenas, weights and lanes of one plan, and runs its passes: ids in, logits out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from penstock.errors import BadRequest, DamagedModel, PenstockError
from penstock.graph.lower import Lowering
from penstock.graph.pages import check_tables
from penstock.graph.tasks import Call, Pass, Task
from penstock.graph.timeline import Timeline
from penstock.runtime import host
from penstock.runtime.ahead import PassAhead
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding
from penstock.runtime.bind_native import NativeBinding, native
from penstock.runtime.device import Device, uses_device
from penstock.runtime.dispatch import Dispatch
from penstock.runtime.execute import Executor
from penstock.runtime.first_loads import load_weights
from penstock.runtime.host import Progress
from penstock.runtime.kv_file import KvFile
from penstock.runtime.kv_pages import KvPages
from penstock.runtime.made import between_passes, copied
from penstock.runtime.movers import DiskReader
from penstock.runtime.open_passes import OpenPassRunner, open_lowering
from penstock.runtime.reread import NOTHING, Read, from_disk, from_ram, streamed_ranges
from penstock.serve.hearing import Hearing
from penstock.serve.kept import Held
from penstock.serve.traffic import Traffic
from penstock.spec.places import DISK, HOST, Lane
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from penstock.store.writer import Fill

CLOSED = "this model was closed: load it again"
# Called after each pass with the tasks that ended since the pass before. With None: loads that ended after the last
# pass.
Watch = Callable[[Timeline, Pass | None], None]
FirstPass = tuple[Pass, Sequence[NDArray[np.int32]]]  # with the token ids of its batches, int32 [T] each


@dataclass(frozen=True, kw_only=True)
class Running:
    """How passes are computed.

    `threads`: at most one for each CPU that this process may use, which is also what None means. `kernels`: avx512,
    amx, avxvnni, avx2, portable or reference (numpy); None for the best here. `exact`: integer weights are multiplied
    with float32 activations instead of int8 ones, and KV in integers with float32 factors instead of rounded ones.
    `serial`: one task at a time (the oracle). `poisoned`: ring slots are filled with NaN before each load.
    """

    threads: int | None = None
    kernels: str | None = None
    exact: bool = False
    serial: bool = False
    poisoned: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether passes are computed as predictions assume. Each family of kernels has figures of its own."""
        return self.threads is None and self.kernels != "reference" and not (self.exact or self.serial or self.poisoned)


class Session:
    """Steps passes of one plan over one packed model.

    `kv_folder`: for KV that the plan keeps on a disk; None for the model's folder. `device`: for a plan that computes
    on a device; the session closes it. `first`: a pass that is likely to be stepped first, and the token ids of its
    batches. Where all weights stay in RAM it is begun while they are loaded, and `step` does what is left of it.
    `fill`: makes the weights of a checkpoint, for a `packed` without files and a plan that `stays_here`. The attribute
    `kernels` says which kernels were taken, and why.

    Raises BadRequest where the plan is for another model, or needs a device and there is none; StorageFailed,
    DamagedModel, BrokenModel (predictors that are not finite), DoesNotFit and DeviceFailed while loading.
    """

    def __init__(
        self,
        packed: Packed,
        plan: Plan,
        how: Running = Running(),
        *,
        kv_folder: Path | None = None,
        device: Device | None = None,
        on_progress: Progress | None = None,
        first: FirstPass | None = None,
        fill: Fill | None = None,
    ) -> None:
        _require_match(packed, plan, device)
        self.plan, self.device, self._how, self._closed = plan, device, how, False
        self.lowering = Lowering(plan)
        self._traffic = Traffic(plan.units, device is not None)
        self._stepping = threading.Lock()  # so that memory is given back between two passes, never during one
        self.watchers: list[Watch] = []  # where there are none, no timeline is kept
        # Called when a pass meets damaged weights. Returns the error to raise.
        self.on_damage: Callable[[DamagedModel], DamagedModel] | None = None
        self._origin_s = time.perf_counter()
        self.best: list[list[tuple[float, int]]] = []  # last pass, per batch and row: largest logit, its id
        # Of the last pass, per batch: hidden states float32 [T, d_embed], None where they were not wanted.
        self.hidden: list[NDArray[np.float32] | None] = []
        # Seconds until the weights that stay were there, and those in which the system made the arenas' pages ready.
        self.ready_s = self.pages_s = 0.0
        self.held = Held()  # what its sequences hold
        self._saves_late = any(home.home != HOST or home.attend != HOST for home in plan.kv)
        # The number of passes that were begun, and of late saves that failed. If it changes, KV is not what it was.
        self.passes = 0
        self.was_ahead = False  # whether the last pass was begun while weights were loaded
        self.consumed_bytes = 0  # that the last pass took from slower tiers: through its rings, embedding rows and KV
        with ExitStack() as opened:  # if loading fails half-way, everything is given back
            self._open_memory(packed, kv_folder, opened, () if fill is None else (f"{HOST}.weights",))
            self._open_lanes(packed, opened)
            self._first, self._ahead = first, self._begun_ahead(first)
            self._load_weights(packed, on_progress, fill)
            self._opened = opened.pop_all()

    def _open_memory(self, packed: Packed, kv_folder: Path | None, opened: ExitStack, written: Sequence[str]) -> None:
        """Opens the files of weights, allocates the arenas, and makes the file of KV on a disk. `written`: as for
        `Arenas`."""
        plan, device = self.plan, self.device
        if device is not None:
            opened.callback(device.close)
        self._arenas = Arenas(plan, device.allocate if device is not None else None, True, written)
        opened.callback(self._arenas.close)
        # After the arenas, so that it is closed before them: Ctrl-C may leave a load under way that no task knows of.
        self.reader = DiskReader(packed, plan.io_block_bytes, plan.io_depth, plan.io_engine)
        opened.callback(self.reader.close)
        self.kv_file: KvFile | None = None
        if kv_bytes := plan.tier_bytes().get(DISK.tier, 0):
            self.kv_file = KvFile(kv_folder or packed.folder, kv_bytes, plan.io_block_bytes, plan.io_engine)
            opened.callback(self.kv_file.close)
        self.kv_pages = KvPages(self.lowering.layout.kv, self._arenas, self.kv_file)

    def _open_lanes(self, packed: Packed, opened: ExitStack) -> None:
        """Binds the plan to the kernels of the host and of the device, and makes the executor."""
        plan, how, device = self.plan, self._how, self.device
        self._binding, self.kernels = _bind(plan, self._arenas, self.reader, self.kv_file, how)
        if device is not None:
            beside = replace(how, poisoned=True)
            device.attach(plan, self._arenas, lambda: _bind(plan, self._arenas, None, None, beside)[0])
        self.hearing = Hearing(plan, self._binding, packed.orders)
        self._work = Dispatch(self._binding, device)
        # numpy has little left to do, and the threads of its BLAS spin while they wait. Beside one other busy process
        # a product of 8 rows took 40 times as long with two of these threads as with one (docs/LOG.md).
        opened.callback(threadpool_limits(1, user_api="blas").restore_original_limits)
        self._executor = self._new_executor()
        self.lowering, self._open_runner = self._new_lowering()
        opened.callback(lambda: self._executor.close())

    def step(self, p: Pass, tokens: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Runs one pass. `tokens[i]`: the ids of p.batches[i], int32 [T]. Returns the logits of each batch, float32
        [n, V], for its n rows that want them. They are views that hold until the next pass, as those of `hidden` do.

        Raises BadRequest after `close`, DamagedModel, StorageFailed, DeviceFailed."""
        with self._stepping:
            if self._closed:
                raise BadRequest(CLOSED)
            self.passes += 1
            return self._step(p, tokens)

    def _step(self, p: Pass, tokens: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        spec = self.plan.target.spec
        check_tables(self.lowering.layout, p)
        ahead = self._taken_ahead(p, tokens)
        self._place(p, tokens)
        self._traffic.streamed_bytes = self._binding.fetched_bytes = 0
        self._executor.recording = bool(self.watchers)
        if self.device is not None:
            self.device.time_tasks(bool(self.watchers))
        # Damaged weights overflow. The sampler says so once; numpy would say so many times.
        try:
            with np.errstate(all="ignore"):
                self.was_ahead = ahead is not None and ahead.finish()
                now_s = time.perf_counter() - self._origin_s
                timeline = Timeline((), now_s, now_s) if self.was_ahead else self._run(p)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self._saves_late:
                self.held.broke_off(p)
            else:  # what is saved late may not have been saved
                self.held.forget()
            self._start_over()
            if isinstance(error, DamagedModel) and self.on_damage is not None:
                raise self.on_damage(error) from None
            raise
        self.consumed_bytes = self._traffic.streamed_bytes + self._binding.fetched_bytes
        self.held.note(p, tokens)
        self._tell(timeline, p)
        logits, self.best, self.hidden = [], [], []
        for batch in p.batches:
            n = len(batch.logits)
            best = self._arenas.view(self.lowering.layout.act(HOST, batch.id, "best", 8 * n))
            values, ids = best.view(np.float32)[0::2], best.view(np.int32)[1::2]
            self.best.append(list(zip(values.tolist(), ids.tolist(), strict=True)))
            slot = self.lowering.layout.act(HOST, batch.id, "logits", 4 * n * spec.vocab)
            logits.append(self._arenas.array(slot, np.float32, (n, spec.vocab)))
            shape = (batch.total_rows, spec.d_embed)
            rows = self.lowering.layout.act(HOST, batch.id, "rows", 4 * shape[0] * shape[1])
            self.hidden.append(self._arenas.array(rows, np.float32, shape) if batch.hidden else None)
        return logits

    def _place(self, p: Pass, tokens: Sequence[NDArray[np.int32]]) -> None:
        """Writes token ids to where the pass reads them."""
        for batch, ids in zip(p.batches, tokens, strict=True):
            slot = self.lowering.layout.act(HOST, batch.id, "tokens", 4 * batch.total_rows)
            self._arenas.view(slot).view(np.int32)[...] = ids

    def _begun_ahead(self, first: FirstPass | None) -> PassAhead | None:
        """The first pass, to be done while weights are loaded. None where none is foreseen, or something streams, or
        tasks are done otherwise than by the CPU and as they come."""
        if first is None or self.device is not None or self._how.serial or not self.lowering.stays:
            return None
        self._place(*first)
        return PassAhead(self._counted(first[0]), self._work)

    def _taken_ahead(self, p: Pass, tokens: Sequence[NDArray[np.int32]]) -> PassAhead | None:
        """The pass that was begun while weights were loaded, if it is this one, and nobody listens to it. It is
        forgotten: whatever pass comes next, it writes where that one did."""
        (ahead, self._ahead), (first, self._first) = (self._ahead, None), (self._first, None)
        if ahead is None or first is None or self.watchers or self.hearing.listens:
            return None
        same = p._replace(then=None) == first[0]._replace(then=None)  # what comes next streams nothing either
        return ahead if same and all(map(np.array_equal, tokens, first[1])) else None

    def _run(self, p: Pass) -> Timeline:
        runner = self._open_runner
        open_pass = self.lowering.open_pass(p) if runner is not None else None
        if runner is None or open_pass is None or not runner.can(open_pass):
            run = self._executor.run_serial if self._how.serial else self._executor.run
            return run(self._counted(p))
        timeline = self._executor.run_open(runner, open_pass, p, self.hearing.given, self.hearing.heard)
        self._traffic.streamed_bytes += runner.loaded_bytes
        return timeline

    def settled_kv(self) -> KvPages:
        """The KV pages, for use until the next pass. Waits for saves of the last pass that are still on their way to a
        disk, or from a device. Raises the error of a save that failed; then no page is to be trusted any more."""
        if self._saves_late:
            with self._stepping:
                if self._closed:
                    raise BadRequest(CLOSED)
                try:
                    self._tell(self._executor.drain(), None)
                except PenstockError:
                    self.held.forget()
                    self._start_over()
                    raise
        return self.kv_pages

    @property
    def arena_bytes(self) -> int:
        """Bytes that were allocated of the host's memory for the plan's arenas."""
        return self._arenas.nbytes

    @property
    def peak_host_bytes(self) -> int:
        """The peak of this process's memory, less the memory that stands in for a device's."""
        return host.peak_rss_bytes() - (self.device.borrowed_bytes if self.device else 0)

    @property
    def peak_device_bytes(self) -> int:
        return self.device.peak_bytes if self.device else 0

    def close(self) -> None:
        """Gives all memory back. May be called after a pass that failed, and from another thread than the one that
        steps: a pass under way ends first. A second call does nothing."""
        self._closed = True
        with self._stepping:
            self._opened.close()

    def bytes_moved(self) -> dict[Lane, int]:
        """Bytes by lane so far: weights and KV that were read from each disk, KV that was written to it, and bytes that
        crossed the link each way."""
        moved = {**self.reader.bytes_by_disk, **self._traffic.link_bytes}
        if self.kv_file is not None:
            moved[DISK.reads] = moved.get(DISK.reads, 0) + self.kv_file.bytes_read
            moved[DISK.writes] = self.kv_file.bytes_written
        return moved

    def loaded_granules(self) -> Fill:
        """Gives the granules that stay in RAM as they are packed, between passes. Of a plan that `stays_here`."""
        fill = copied(self.plan, self.lowering.layout, self._arenas)
        return between_passes(fill, self._stepping, lambda: self._closed)

    def reread(self, seconds: float) -> tuple[Read, Read]:
        """Times the disk and the RAM, in this order. Loads the weights that a decode pass streams, for about so many
        `seconds`, and reads the weights that stay in RAM, for some 20 ms. Rings and caches lose what they hold. Raises
        StorageFailed, DamagedModel."""
        return self.read_streamed(seconds), self.read_resident()

    def read_streamed(self, seconds: float, least_bytes: int = 1) -> Read:
        """Times the disk: loads the weights that a decode pass streams, for about so many `seconds`. NOTHING where
        they have fewer than `least_bytes`. Rings and caches lose what they hold. Raises StorageFailed, DamagedModel."""
        self.drain()
        ranges = streamed_ranges(self.plan, self.lowering.layout)
        if sum(nbytes for *_, nbytes in ranges) < least_bytes or HOST not in self.plan.ring_bytes:
            return NOTHING
        try:
            return from_disk(self.reader, ranges, self._arenas.whole(f"{HOST}.ring"), seconds)
        finally:
            self._start_over()

    def read_resident(self) -> Read:
        """Times the RAM, for some 20 ms: reads the weights that stay there. NOTHING where none do."""
        if not self._arenas.sees(f"{HOST}.weights"):
            return NOTHING
        weights = self._arenas.whole(f"{HOST}.weights")
        return from_ram(weights.ctypes.data, len(weights), host.usable_threads(self._how.threads))

    def drain(self) -> None:
        """Waits for the loads under way, so that counters stand still."""
        with self._stepping:
            if self._closed:
                return
            try:
                self._tell(self._executor.drain(), None)
            except PenstockError:  # a load for a pass that never came; a broken disk fails the next pass too
                if self._saves_late:  # or KV that was not saved: a service must not find its page either
                    self.held.forget()
                    self.passes += 1
                self._start_over()

    def _start_over(self) -> None:
        """Forgets what rings hold and which lanes have failed. Called when a pass broke off, so that the next one
        starts clean."""
        self._executor.close()
        self._work.forget()
        self._traffic.forget()
        self._executor = self._new_executor()
        self.lowering, self._open_runner = self._new_lowering()

    def _new_lowering(self) -> tuple[Lowering, OpenPassRunner | None]:
        """A lowering whose caches are empty, and what runs its open passes. No pass is an open pass if tasks are done
        one by one, by numpy, or beside a device."""
        if not isinstance(self._binding, NativeBinding) or self._how.serial or self.device is not None:
            return Lowering(self.plan), None
        return open_lowering(self.plan, self._binding, self.reader, self._arenas)

    def _new_executor(self) -> Executor:
        return Executor(self._work, self.plan.units, self._origin_s)

    def _tell(self, timeline: Timeline, p: Pass | None) -> None:
        for watch in self.watchers:
            watch(timeline, p)

    def _counted(self, p: Pass) -> Iterator[Task]:
        # A timeline tells of each task's own bytes, so it is made of tasks that have them.
        by_batches = self._binding.by_batches and self.device is None and not self.watchers
        return self._traffic.counted(self.lowering.step(p, self._asked, by_batches))

    def _asked(self, call: Call) -> Sequence[Sequence[int]]:
        """The answer of a router's call, whose task is done first."""
        self._executor.catch_up()
        return self.hearing.answer(call)

    def _load_weights(self, packed: Packed, on_progress: Progress | None, fill: Fill | None) -> None:
        layout, arenas, device = self.lowering.layout, self._arenas, self.device
        with nullcontext() if self._ahead is None else self._ahead.following() as arrived:
            loaded = load_weights(self.plan, layout, packed, self.reader, arenas, device, on_progress, arrived, fill)
        self.loaded_bytes, self.loading = loaded  # the second: of those loads that did not wait for memory
        self._arenas.settle()
        self.pages_s, self.ready_s = self._arenas.taking_s or 0.0, time.perf_counter() - self._origin_s


def _require_match(packed: Packed, plan: Plan, device: Device | None) -> None:
    """Raises BadRequest for a plan of another model, or one that needs a device where there is none."""
    if (packed.spec.vocab, packed.weights) != (plan.target.spec.vocab, plan.target.weights):
        raise BadRequest(f"this plan is not for {packed.folder}: it has {plan.target.weights.name} weights")
    for each in plan.predictors:
        part = packed.parts.get(f"{each.layer}.predictor")
        if part != each.part(plan.target.spec) or each.ahead != packed.ahead:
            raise BadRequest(f"this plan is for other predictors than those of {packed.folder}: plan again")
    if uses_device(plan) and device is None:
        raise BadRequest("this plan computes on a device; here there is none (--device says which to take)")


def _bind(
    plan: Plan, arenas: Arenas, reader: DiskReader | None, kv_file: KvFile | None, how: Running
) -> tuple[Binding, str]:
    """(the binding of the plan to kernels of the host, why these kernels). Raises ValueError for kernels that this
    processor has not."""
    if how.kernels == "reference":
        return Binding(plan, arenas, reader, how.poisoned, kv_file), "numpy kernels: asked for"
    chosen = native(how.kernels, host.usable_threads(how.threads), how.exact)
    return NativeBinding(plan, arenas, reader, chosen, how.poisoned, kv_file), chosen.reason
