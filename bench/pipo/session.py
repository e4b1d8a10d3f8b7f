"""A session whose reads and products can be made those of an engine that takes less care, and clocks for it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import token_ids
from bench.pipo.plain import OrdinaryMemory, PlainFiles
from penstock.errors import BadRequest
from penstock.graph import ops, passes
from penstock.graph.tasks import Call, Slot
from penstock.kernels import cpu
from penstock.runtime.arena import Arenas
from penstock.runtime.batch_tables import BatchTables
from penstock.runtime.bind_native import Native, NativeBinding, Target
from penstock.runtime.dispatch import Dispatch
from penstock.runtime.execute import Executor
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import DiskReader
from penstock.serve.session import Session
from penstock.spec.format import Format
from penstock.spec.places import HOST
from penstock.spec.plan import Arena, Plan, PlanModel
from penstock.store.packed import Packed
from penstock.units import round_up

WIDE = Format("float16")  # what FlexGen dequantises to
WIDE_ARENA = "host.wide"
MOST_STEPS = 48  # of a decode that is measured; plans have room for them


def with_wide_arena(plan: Plan) -> Plan:
    """The plan with memory for the largest unit as floats."""
    wide = replace(plan, models=(PlanModel(plan.target.spec, WIDE),))
    nbytes = max(wide.unit_bytes(unit) for unit in plan.units)
    return replace(plan, arenas=(*plan.arenas, Arena(WIDE_ARENA, HOST, round_up(nbytes, 2 << 20))))


class PipoBinding(NativeBinding):
    """`plain`: loads are its buffered reads. `dequantise`: a unit's integer weights become float16 in a buffer before
    they are multiplied (what PIPO §3.4 does away with), on all threads and as tiles that the float16 kernels take."""

    def __init__(
        self,
        plan: Plan,
        arenas: Arenas,
        reader: DiskReader,
        kernels: Native,
        kv_file: KvFile | None = None,
        *,
        plain: PlainFiles | None = None,
        dequantise: bool = False,
    ) -> None:
        super().__init__(plan, arenas, reader, kernels, False, kv_file)
        self._plain = plain
        if dequantise:
            wide = replace(plan, models=(PlanModel(plan.target.spec, WIDE),))
            self._wide = NativeBinding(wide, arenas, None, kernels)
            for op in ("qkv", "out", "ffn", "head"):
                self._natively[op] = self._widened

    def start(self, task: Any) -> Any:
        """Plain reads are done by the lane's own thread, whatever else the runtime may do by itself."""
        return None if self._plain is not None else super().start(task)

    def _load(self, call: Call, op: ops.Load) -> None:
        if self._plain is None:
            super()._load(call, op)
            return
        unit = self._plan.units[call.unit]
        self._plain.read(unit.part, unit.lo, unit.hi, self._arenas.address(op.target))

    def _widened(self, on: Target, call: Call, op: ops.WithUnit, tables: BatchTables) -> None:
        """The op on a float16 copy of its unit; `out` finds the one that `qkv` made."""
        assert isinstance(op.weights, Slot), "a shape with experts is not among these"
        unit, at = self._plan.units[call.unit], self._arenas.address
        part, wide = self._parts[unit.part], self._wide._parts[unit.part]
        if not all(block.tiled for block in part.blocks):
            raise BadRequest(f"{unit.part} has biases, which this bench does not carry over")
        count = unit.hi - unit.lo
        copy = Slot(WIDE_ARENA, 0, count * wide.granule_bytes)
        if not isinstance(op, ops.Out):
            for block, target in zip(part.blocks, wide.blocks, strict=True):
                on.widen(
                    weights=at(op.weights), count=count, stride=part.granule_bytes, matrix=cpu.matrix(block),
                    wide=cpu.matrix(target), out=at(copy), out_stride=wide.granule_bytes,
                )  # fmt: skip
        self._wide._natively[call.op](on, call, op._replace(weights=copy), tables)


class PipoSession(Session):
    """`plain` and `dequantise`: see PipoBinding. Sequences are random tokens; a decode may begin at any position, for
    how long a step takes does not depend on what the KV before it holds."""

    def __init__(
        self, packed: Packed, plan: Plan, kv_folder: Path, *, plain: bool = False, dequantise: bool = False
    ) -> None:
        plan = with_wide_arena(plan) if dequantise else plan
        super().__init__(packed, plan, kv_folder=kv_folder)
        self._vocab = packed.spec.vocab
        self.plain = PlainFiles(packed) if plain else None
        if not plain and not dequantise:
            return
        assert isinstance(self._binding, NativeBinding)
        kernels = Native(self._binding._compute, False, self.kernels)
        self._binding = PipoBinding(
            plan, self._arenas, self.reader, kernels, self.kv_file, plain=self.plain, dequantise=dequantise
        )
        self._work = Dispatch(self._binding)
        self._executor = Executor(self._work)
        if self.plain is not None:
            self._opened.callback(self.plain.close)
            ring = OrdinaryMemory(len(self._arenas.whole("host.ring")))
            self._arenas._memory["host.ring"], self._arenas._bytes["host.ring"] = ring, ring.array  # type: ignore[assignment]
            self._arenas._addresses["host.ring"] = ring.address

    @property
    def host_bytes(self) -> int:
        """What the plan takes of the memory, the process itself included."""
        return self.plan.tier_bytes()[HOST]

    def prefill_s(self, tokens: int, seq: int = 0) -> float:
        """Seconds from an empty sequence to the first token after a prompt of random ids."""
        ids = token_ids(self._vocab, tokens, seq)
        wanted = list(passes.prefill(self.plan, seq, tokens, passes.DECODE))
        start_s = time.perf_counter()
        for p in wanted:
            batch = p.batches[0]
            (logits,) = self.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        return seconds

    def step_s(self, position: int, steps: int, least_s: float, seqs: int = 1) -> float:
        """Mean seconds of decode steps from `position` + 1 on, one token of each sequence: of `steps` of them, or of as
        many as take `least_s`, at most MOST_STEPS. One more comes before them, so that loads run ahead when the clock
        starts as they do when it stops."""
        tokens, start_s, seconds, done = token_ids(self._vocab, seqs), 0.0, 0.0, -1
        while done < steps or (seconds < least_s and done < MOST_STEPS):
            p = passes.decode(self.plan, range(seqs), (position + done + 1,) * seqs, passes.DECODE)
            (logits,) = self.step(p, [tokens])
            tokens = np.array([token for _, token in self.best[0]], np.int32)
            done += 1
            if done == 0:
                start_s = time.perf_counter()
            seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        return seconds / done
