"""The input of every solver: the ask, the model in one number format, and the machine; and sums that follow from
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from penstock.errors import DoesNotFit
from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.cost import Cost
from penstock.planner.firing import Firing, foretold_of, share_of, sparsity_of
from penstock.planner.programs.block_sizes import BATCH_STEP
from penstock.planner.routing import RouterTrace
from penstock.planner.shares import most_that_fit
from penstock.planner.sizes import prompt_and_half_way
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.part_keys import gathered_key, head_key, parts_by_key
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import GPU, HOST, Executor, Tier, is_disk
from penstock.spec.plan import Plan, Predictor
from penstock.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """`ask`: its context is settled (`settle_context`). `weights`: the number format of the weights. `trace`: what
    routers are known to say; None: `routing.stated`. `firing`: how many neurons are known to fire; None:
    `firing.expected`."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    machine: MachineSpec
    trace: RouterTrace | None = None
    firing: Firing | None = None
    _learned: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def sparsity(self) -> str:
        return sparsity_of(self.ask.sparsity, self.spec)

    def fired_share(self, rows: int) -> float:
        """The share of an FFN's neurons of which a call of so many rows computes all."""
        return share_of(self.spec, self.weights, self.firing, rows, self.sparsity)

    @property
    def levels(self) -> tuple[float, ...]:
        """The level of each layer, below which plans are to take activations for zeros; () if they are to have no
        levels."""
        return self.firing.levels if self.sparsity == "threshold" and self.firing is not None else ()

    @cached_property
    def predictors(self) -> tuple[Predictor, ...]:
        """A predictor for each layer, in RAM; () if plans are to have none. A plan may put them elsewhere."""
        known = foretold_of(self.spec, self.firing) if self.sparsity == "predict" else None
        # A solver learns of plans of fewer layers.
        return () if known is None else tuple(each for each in known.predictors if each.layer < self.layers)

    @property
    def parts(self) -> Mapping[str, Part]:
        """The model's parts by key, in the order of the layers."""
        return parts_by_key(self.spec, self.weights)

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        assert self.ask.context is not None, "settle_context came first"
        return self.ask.context

    @property
    def half_way(self) -> int:
        """The position of the decode pass that predictions are of, half-way through the output."""
        return prompt_and_half_way(self.ask, self.context)[1]

    @property
    def layers(self) -> int:
        return len(self.spec.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def may_stay(self) -> int | None:
        """The most bytes of weights that may stay by the user's limit, without those that always do. None if the limit
        is no less than all weights."""
        asked = self.ask.resident_bytes
        if asked is None or asked >= self.total_bytes:
            return None
        return max(0, asked - sum(part.nbytes for part in self.parts.values() if part.kind in PINNED))

    @property
    def head(self) -> Part:
        """The part of the head: of a tied model the embedding."""
        return self.parts[head_key(self.spec)]

    def of_kind(self, kind: str) -> list[Part]:
        """The parts of one kind, such as "ffn", in the order of the layers."""
        return [part for part in self.parts.values() if part.kind == kind]

    @property
    def gathered(self) -> str:
        return gathered_key(self.spec)

    @property
    def kv(self) -> Format:
        """The number format of KV. Unless the ask names one, it is float32 for a float32 model, and float16 for others.
        A file that was quantised may have a router in float32, and is no float32 model. bfloat16 was rejected: in the
        same two bytes its values are 8 times coarser."""
        if self.ask.kv is not None:
            return parse_format(self.ask.kv)
        wide = self.spec.dtype == "float32" and not self.weights.from_file
        return Format("float32" if wide else "float16")

    @cached_property
    def cost(self) -> Cost:
        return Cost(self.machine)

    def learned(self, key: tuple[object, ...], learn: Callable[[], T]) -> T:
        """The result of `learn()`, which a solver gets by lowering plans of a few layers. It is called once for each
        `key`, which names everything that the result depends on."""
        if key not in self._learned:
            self._learned[key] = learn()
        result: T = self._learned[key]
        return result

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that a plan may take: all, or the user's limit. 0 without a device, and where a device
        could not compute: its kernels cannot read formats of GGUF files, and have no levels."""
        if self.weights.for_cpu or self.sparsity == "threshold":
            return 0
        there = next((tier.bytes for tier in self.machine.tiers if tier.name == GPU.executor), 0)
        asked = self.ask.device_memory_bytes
        return there if asked is None else min(there, asked)

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM that a plan may take: the user's limit, or the machine's figure, which is its free RAM less a
        margin."""
        asked = self.ask.host_memory_bytes
        return self.machine.tier(HOST).bytes if asked is None else asked

    @property
    def has_device(self) -> bool:
        """Whether there is a device that can compute, and the ask allows it any memory."""
        return self.device_bytes > 0

    @property
    def wants_blocks(self) -> bool:
        """Whether FlexGen's blocks are wanted, and FlexGen has plans. Blocks of many batches delay the first token, so
        there are none where latency is wanted. There are none of fewer sequences than BATCH_STEP, none with experts,
        none if the user limits the weights that stay (the program has no row for that), and none if the logits of every
        row are wanted."""
        ask = self.ask
        few = ask.batch < BATCH_STEP or ask.objective != "throughput"
        return not (few or self.spec.is_routed or ask.resident_bytes is not None or ask.score)

    def limit_bytes(self, memory: Executor) -> int:
        """Bytes that a plan may take of RAM or of the device's memory."""
        return self.host_bytes if memory == HOST else self.device_bytes

    def fits(self, plan: Plan, *memories: Executor) -> bool:
        """Whether the plan stays within the limits of these memories, by default of RAM and of the device's memory."""
        used = plan.tier_bytes()
        return all(used.get(memory, 0) <= self.limit_bytes(memory) for memory in memories or (HOST, GPU.executor))

    def moves_chosen_values(self, plan: Plan) -> bool:
        """Whether KV crosses to attention as whole pages, where the values of the best positions alone are wanted. Such
        a plan is not taken."""
        return self.ask.value_share < 1 and any(home.home != home.attend for home in plan.kv)

    def spare_bytes(self, plan: Plan, memory: Executor, staying_bytes: int = 0) -> int | None:
        """The plan's `room_bytes` in a memory, within the user's limit of weights that stay. `staying_bytes`: of
        weights that stay in this plan, of those that need not."""
        room = self.room_bytes(plan, memory)
        return room if room is None or self.may_stay is None else min(room, max(0, self.may_stay - staying_bytes))

    def room_bytes(self, plan: Plan, memory: Executor) -> int | None:
        """Bytes that a plan leaves in a memory for more weights. The unfilled rest of the weights' arena, which is
        rounded up to whole huge pages, counts too. None if the plan is over the memory's limit already."""
        spare = self.limit_bytes(memory) - plan.tier_bytes().get(memory, 0)
        if spare < 0:
            return None
        arena = next((a for a in plan.arenas if a.name == f"{memory}.weights"), None)
        rounding = arena.bytes - Layout(plan).filled_bytes(arena.name) if arena else 0
        return rounding + spare // ARENA_ALIGN * ARENA_ALIGN

    def most_on_device(self, count: int, plan_of: Callable[[int], Plan]) -> int:
        """The largest number n up to `count` for which the device's memory has room for `plan_of(n)`; 0 if there is
        none."""
        return most_that_fit(count, lambda n: plan_of(n).tier_bytes()[GPU.executor], self.device_bytes)

    def bytes_of(self, granules: Mapping[str, int]) -> int:
        """Bytes of some granules of some parts. `granules`: part key → how many."""
        parts = self.parts
        return sum(count * parts[key].granule_bytes for key, count in granules.items())

    def asking(self, **changes: Any) -> Problem:
        """This problem with some fields of its ask changed."""
        return replace(self, ask=replace(self.ask, **changes))

    def keeps_kv_elsewhere(self, plan: Plan) -> bool:
        """Whether some KV has another home than the user named. Such a plan is not taken."""
        asked = self.ask.kv_home
        return asked is not None and any(is_disk(home.home) != (asked == "disk") for home in plan.kv)


def too_little(what: str, where: str, tier: Tier, need: int, have: int, hint: str) -> DoesNotFit:
    """The error that says that a memory limit is too small. `what`: the limit's name; `where`: an addition to it, such
    as " beside a device"; `need`, `have`: bytes; `hint`: the command-line options that would do."""
    return DoesNotFit(
        f"{what} of {format_bytes(have)} is too little{where}: this model needs at least {format_bytes(need)} ({hint})",
        tier=tier, need_bytes=need, have_bytes=have, minimum_bytes=need,
    )  # fmt: skip
