"""Ways to choose which groups of neurons a device holds, to be compared: PowerInfer's program, the seconds of a token,
hottest first, and at random. Each gives None if nothing is allowed, or nothing was found in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.planner.programs import neurons as ilp
from penstock.planner.programs import placement


@dataclass(frozen=True, slots=True)
class ChosenNeurons:
    """How many groups of each layer the device holds, the seconds that the layers take so, and a sentence about who
    chose them."""

    counts: ilp.Counts
    seconds: float
    why: str


Choose = Callable[[ilp.NeuronProgram, Sequence[placement.TokenTimes]], ChosenNeurons | None]


def by_program(program: ilp.NeuronProgram, rates: Sequence[placement.TokenTimes]) -> ChosenNeurons | None:
    solution = ilp.solve(program)
    if solution is None:
        return None
    return ChosenNeurons(
        solution.counts,
        placement.seconds_of(program, rates, solution.counts),
        f"placed by an integer program ({solution.found_by}, within {solution.gap:.2%} of the best there is)",
    )


def by_seconds(program: ilp.NeuronProgram, rates: Sequence[placement.TokenTimes]) -> ChosenNeurons | None:
    solution = placement.fastest(program, rates)
    if solution is None:
        return None
    whole = sum(n == len(layer.impacts) for n, layer in zip(solution.counts, program.layers, strict=True))
    return ChosenNeurons(
        solution.counts,
        solution.seconds,
        f"placed by the seconds of a token (within {solution.gap:.2%} of the best there is): {whole} layers are there"
        " whole, and wait for no CPU",
    )


def hottest(program: ilp.NeuronProgram, rates: Sequence[placement.TokenTimes]) -> ChosenNeurons | None:
    return _if_allowed(program, rates, placement.hottest_first(program), "the hottest neurons of all layers come first")


def drawn(program: ilp.NeuronProgram, rates: Sequence[placement.TokenTimes]) -> ChosenNeurons | None:
    return _if_allowed(program, rates, placement.at_random(program), "neurons are drawn at random")


def _if_allowed(
    program: ilp.NeuronProgram, rates: Sequence[placement.TokenTimes], counts: ilp.Counts, why: str
) -> ChosenNeurons | None:  # fmt: skip
    used = sum(n * layer.group_bytes for n, layer in zip(counts, program.layers, strict=True))
    seconds = placement.seconds_of(program, rates, counts)
    return ChosenNeurons(counts, seconds, why) if 0 <= program.total_bytes - used <= program.host_bytes else None
