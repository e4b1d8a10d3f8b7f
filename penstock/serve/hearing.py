"""Tells listeners what routers, predictors and FFNs say while a session runs its passes, and lets a test answer in
their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.graph.arenas import neurons_of
from penstock.graph.demand import Answer
from penstock.graph.ops import Predict, Route
from penstock.graph.tasks import Call
from penstock.runtime.bind import Binding, OnFired, OnRoute
from penstock.runtime.bind_native import NativeBinding
from penstock.serve.numbering import by_number
from penstock.spec.places import HOST
from penstock.spec.plan import Plan

# Gets a layer, and uint8 [T, neurons]: whether its predictor calls each one active.
OnForetold = Callable[[int, NDArray[np.uint8]], None]


class Hearing:
    """The listeners of one session. `orders`: layer → the order in which its neurons lie (`spec.order`).

    The session reads the attributes. `answer`: says which experts the rows of a router's call go to, for caches that
    ask. `given`: the function that `answered_by` put in its place, or None. `heard`: the listener to these answers."""

    def __init__(self, plan: Plan, binding: Binding, orders: Mapping[int, Sequence[int]]) -> None:
        self._plan, self._binding, self._orders = plan, binding, orders
        self.answer: Answer = binding.answer
        self.given: Answer | None = None
        self.heard: list[OnRoute] = []

    @contextmanager
    def routers(self, heard: OnRoute) -> Iterator[None]:
        """In this block `heard` is called with the answer of every router, call by call. Passes are slower in it.
        Raises BadRequest where a router is on a device, since devices do not report answers."""
        parts = self._plan.parts
        if any(parts[unit.part].kind == "router" and unit.home != HOST for unit in self._plan.units):
            raise BadRequest("this plan has routers on a device, where they are not heard: give --device none")
        with self._told_routes(heard):
            yield

    @contextmanager
    def neurons(self, heard: OnFired, by_place: bool = False) -> Iterator[None]:
        """In this block `heard` is called with each layer, its FFN's input, float32 [T, D], and, uint8 [T, neurons],
        which of its neurons fired in each row, by the checkpoint's numbers, or `by_place` as they lie. Both arrays hold
        for that call. Passes are slower in it, and of one batch. Raises BadRequest where a device or numpy computes
        FFNs, since these do not report who fired."""
        parts = self._plan.parts
        here = all(unit.prefill == unit.decode == HOST for unit in self._plan.units if parts[unit.part].kind == "ffn")
        if not here:
            raise BadRequest("this plan has FFNs on a device, where nobody hears who fires: give --device none")
        if not isinstance(self._binding, NativeBinding) or self._plan.batches_per_pass > 1:
            raise BadRequest("who fires is heard of native kernels alone, and of one batch a pass")
        self._binding.on_fired = heard if by_place else by_number(heard, self._orders)
        try:
            yield
        finally:
            self._binding.on_fired = None

    @contextmanager
    def foretold(self, heard: OnForetold) -> Iterator[None]:
        """In this block `heard` is called with each layer and, uint8 [T, neurons], which of its neurons its predictor
        calls active in each row, by the checkpoint's numbers. Passes are slower in it, and of one batch. Raises
        BadRequest where predictors are on a device, which does not report them."""
        if self._plan.batches_per_pass > 1 or any(each.home != HOST for each in self._plan.predictors):
            raise BadRequest("this plan has predictors on a device, or several batches a pass: give --device none")
        spec = self._plan.target.spec

        def hear(call: Call, said: list[list[int]]) -> None:
            assert isinstance(call.operands, Predict)
            layer = call.operands.layer
            active = np.zeros((len(said), neurons_of(spec.layers[layer])), np.uint8)
            order = np.asarray(self._orders.get(layer, range(active.shape[1])))
            for row, places in zip(active, said, strict=True):
                row[order[places]] = 1
            heard(layer, active)

        with self._told_routes(hear):
            yield

    @contextmanager
    def answers(self, heard: OnRoute) -> Iterator[None]:
        """In this block `heard` is called with the answers that the plan's caches ask for, or its units that are asked
        for, and no others. Nothing is slower."""
        answer_before = self.answer

        def answer(call: Call) -> Sequence[Sequence[int]]:
            experts = [list(row) for row in answer_before(call)]
            heard(call, experts)
            return experts

        self.answer = answer
        self.heard.append(heard)
        try:
            yield
        finally:
            self.answer = answer_before
            self.heard.remove(heard)

    @contextmanager
    def answered_by(self, given: Answer, every_pass: bool = True) -> Iterator[None]:
        """In this block the experts of each row are those of `given(call)`, and not the router's. Guesses are those of
        `given` too. `given` may be called twice with one call. Without `every_pass` only the answers that the plan's
        caches ask for are replaced, and nothing is slower: for plans without a device, which might copy the router's
        own answer before it is replaced. Where units are asked for their neurons, `given` says the places of those
        that fire, or with `every_pass` all that predictors call active. For tests and benches."""

        def answer(call: Call) -> Sequence[Sequence[int]]:
            said = given(call)
            if not (isinstance(call.operands, Route) and call.operands.guesses):
                self._set(call, said)
            return said

        instead = self.routers(lambda call, _: self._set(call, given(call)))
        self.answer, self.given = answer, given
        with instead if every_pass else nullcontext():
            try:
                yield
            finally:
                self.answer, self.given = self._binding.answer, None

    @contextmanager
    def _told_routes(self, heard: OnRoute) -> Iterator[None]:
        """In this block the binding calls `heard` after the calls of routers and predictors."""
        self._binding.on_route = heard
        try:
            yield
        finally:
            self._binding.on_route = None

    def _set(self, call: Call, said: Sequence[Sequence[int]]) -> None:
        (self._binding.set_routes if isinstance(call.operands, Route) else self._binding.set_live)(call, said)

    @property
    def slows(self) -> bool:
        """Whether passes are slower, since somebody hears more than what tasks depend on."""
        return self._binding.hears

    @property
    def listens(self) -> bool:
        """Whether anybody hears routers or neurons, or answers in place of routers."""
        return bool(self.heard) or self.given is not None or self._binding.hears

    def guess(self, call: Call) -> list[list[int]] | None:
        """What the router of the next layer would guess, from what this router's call has just read: the experts of
        each row, the likeliest first. None where the next layer has none. For listeners of `routers`."""
        return self._binding.guess(call)
