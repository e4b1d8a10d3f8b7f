"""Foretells how long a batch takes, from its lines as they are: lengths differ, and lines that begin alike share what
they begin with. A scheduler takes the lines on a virtual clock, as `answering` takes them on the real one
(`serve.foretold`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.planner.pass_times import PassTimes
from penstock.planner.predict import Prediction
from penstock.runtime.host import Progress
from penstock.serve.batch.survey import Todo
from penstock.serve.foretold import VirtualClock
from penstock.serve.pages import Ids
from penstock.serve.scheduler import Scheduler, all_rows
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan

# Beyond so many passes, or rows in them, the rest is taken to go on at the same pace. They take some seconds.
_MOST_PASSES, _MOST_ROWS = 2000, 1 << 18
_TOLD_PASSES = 8  # between two words about how far it is
AHEAD = 16  # answers that wait beside those under way, so that no place stays empty


@dataclass(frozen=True)
class Foretelling:
    """`ends_s[i]`: seconds until i + 1 answers are whole, ascending. `ttft_s`: until the first token of any."""

    ends_s: Sequence[float] = field(default_factory=lambda: array("d"))
    ttft_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all answers."""
        return self.ends_s[-1] if self.ends_s else 0.0

    def left_s(self, answers: int) -> float:
        """Seconds that are left once so many answers are whole."""
        return self.seconds - self._until_s(answers)

    def left_at_pace_s(self, answers: int, spent_s: float) -> float | None:
        """As `left_s`, if the answers so far took `spent_s`. The rest is taken to be off by the same factor. None
        before the first answer."""
        until_s = self._until_s(answers)
        return self.left_s(answers) * spent_s / until_s if until_s else None

    def _until_s(self, answers: int) -> float:
        return self.ends_s[min(answers, len(self.ends_s)) - 1] if answers and self.ends_s else 0.0


def predicted_s(plan: Plan, prediction: Prediction, ask: Ask, answers: int) -> float:
    """Seconds for so many answers of the ask's lengths, as many at once as the plan has room for, block after block."""
    at_once = plan.at_once(ask.batch, ask.sequence_tokens)
    return prediction.total_s * answers / max(1, min(at_once, answers))


def foretell(
    plan: Plan, prediction: Prediction, ask: Ask, machine: MachineSpec, todo: Sequence[Todo],
    on_progress: Progress | None = None,
) -> Foretelling:  # fmt: skip
    """Foretells lines in the order in which they are taken. Each answer is assumed to have all tokens that it may have.
    `on_progress`: is told how many answers are foretold.

    If passes have several batches, only the plan's own prediction knows how long their prompts take together. Then the
    tokens of prompts and of answers are assumed to go at the speed of the ask's block."""
    places = plan.at_once(ask.batch, ask.sequence_tokens)
    if plan.batches_per_pass == 1:
        return in_passes(plan, PassTimes(plan, machine, "prefill"), todo, places, on_progress)
    answers = sum(each.answers for each in todo)
    said = sum(each.answers * each.output_tokens for each in todo)
    read = sum(map(_rows, todo)) - sum(each.answers * (each.output_tokens - 1) for each in todo)
    whole_s = prediction.ttft_s * read / (places * ask.prompt_tokens)
    whole_s += (prediction.total_s - prediction.ttft_s) / ask.output_tokens * said / min(places, answers)
    first_s = min(prediction.ttft_s, whole_s)
    return Foretelling(array("d", (whole_s * (i + 1) / answers for i in range(answers))), first_s)


def in_passes(
    plan: Plan, times: PassTimes, todo: Sequence[Todo], places: int, on_progress: Progress | None = None
) -> Foretelling:  # fmt: skip
    """Foretells them pass by pass. `places`: answers at once."""
    prompts: dict[int, Ids] = {}

    def ids(request: int, start: int, count: int) -> Ids:
        known = prompts[request][start : start + count]
        return np.concatenate([known, np.full(count - len(known), -1 - request, np.int32)])

    scheduler = Scheduler(plan, all_rows(plan), 1 << 60, ids, mixed="prefill")
    clock, coming = VirtualClock(scheduler, times, {}), _requests(todo)
    total_rows, done_rows, number = sum(map(_rows, todo)), 0, 0
    ends, more, answers = array("d"), True, sum(each.answers for each in todo)
    for number_of_pass in range(_MOST_PASSES):
        if on_progress is not None and number_of_pass % _TOLD_PASSES == 0:
            share = max(number_of_pass / _MOST_PASSES, done_rows / min(_MOST_ROWS, max(1, total_rows)))
            on_progress("foretelling, answers", round(min(1.0, share) * answers), answers)
        while more and number - len(clock.end_s) < 2 * places + AHEAD:
            request = next(coming, None)
            if request is None:
                more = False
                break
            prompts[number], output = request
            clock.submit(number, prompts[number], output, clock.now_s)
            number += 1
        if done_rows > _MOST_ROWS or not clock.step():
            break
        done_rows += clock.rows
        for request_over in clock.over:
            ends.append(clock.now_s)
            del prompts[request_over]
    left = answers - len(ends)
    if left:
        last_s = ends[-1] if ends else 0.0
        whole_s = clock.now_s * max(1.0, total_rows / max(1, done_rows))
        ends.extend(last_s + (whole_s - last_s) * (i + 1) / left for i in range(left))
    # Where no token was said in the passes that were foretold, the first comes with the first answer at the latest.
    return Foretelling(ends, min(clock.first_s.values(), default=ends[0] if ends else 0.0))


def _rows(todo: Todo) -> int:
    """Rows that go through the model for a line: those of its prompts, without the beginnings that other lines have
    read, and those of its answers."""
    copies = todo.answers // todo.prompts
    return todo.prompt_tokens // copies - todo.shared_tokens + todo.answers * (todo.output_tokens - 1)


def _lengths(todo: Todo) -> list[int]:
    """Tokens of each of a line's prompts, of which it knows the sum alone: all alike, but that the first has at least
    what it shares."""
    whole = todo.prompt_tokens * todo.prompts // todo.answers
    first = max(whole // todo.prompts, todo.shared_tokens)
    others = todo.prompts - 1
    return [first, *((whole - first) * (i + 1) // others - (whole - first) * i // others for i in range(others))]


def _requests(todo: Sequence[Todo]) -> Iterator[tuple[Ids, int]]:
    """(made-up ids of a prompt, int32 [n], tokens of the answer) of each answer: what lines share is the same."""
    groups: dict[int, int] = {}
    for line, each in enumerate(todo):
        copies = each.answers // each.prompts
        group = groups.setdefault(each.beginning, len(groups)) if each.beginning != -1 else -1
        for prompt, length in enumerate(_lengths(each)):
            own = 1 + (line * 7919 + prompt) % (1 << 30)
            alike = 0  # of a line's other prompts nobody knows what they share
            if prompt == 0:  # the first line of a group is what the others share the beginning of
                alike = length if group >= 0 and not each.shared_tokens else each.shared_tokens
            ids = np.concatenate(
                [np.full(alike, -2 - group, np.int32), np.full(length - alike, own, np.int32)]
            )  # fmt: skip
            for _ in range(copies):
                yield ids, each.output_tokens
