"""`penstock run`: answers a prompt, or chats."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from penstock.cli.live import live
from penstock.cli.loading import loaded, packed_model, tracing
from penstock.cli.options import (
    CacheLimit,
    Json,
    Machine,
    Model,
    PlanFile,
    Sampling,
    TraceName,
    Weights,
    Work,
    given_plan,
)
from penstock.cli.output import note, print_json, speed_line
from penstock.cli.writing import writing
from penstock.errors import BadRequest, PenstockError
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.planner.predict import Prediction
    from penstock.serve.engine import Engine
    from penstock.serve.generation import Generation
    from penstock.serve.sampling import SamplingParams
    from penstock.serve.tokenizer import Tokenizer

_NO_TEMPLATE = "this model has no chat template"
# A base model writes this where the user would speak again.
_NEXT_TURN = "\nUser:"
# Control characters are left out of a model's text, which must not move the cursor or rename the window.
_CONTROLS = dict.fromkeys([*(c for c in range(32) if chr(c) not in "\n\t"), *range(127, 160)])


def run(
    model: Model,
    machine: Machine,
    work: Work,
    sampling: Sampling,
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="Default: standard input, or a chat at a terminal.")
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it stands, without the chat template.")] = False,
    weights: Weights = None,
    plan_file: PlanFile = None,
    trace: TraceName = None,
    record: Annotated[
        str | None,
        Option("--record", metavar="FILE", help="Also keep what routers said, for `penstock plan --answers`."),
    ] = None,
    cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:
    """One answer to PROMPT, or a chat; streams as it comes. Packs a checkpoint on first use.

    What no sampling flag names comes from the model's generation_config.json; without one the best token is
    always taken.
    """
    machine.prepare()
    from penstock.serve.confined import Child

    spare = Child()  # it comes up while this process imports the rest
    plan = given_plan(plan_file, machine, work)
    chatting = prompt is None and not as_json and sys.stdin.isatty()
    # These two raise for wrong flags, before a first use packs for minutes.
    ask = work.ask(machine)
    sampling.params({}, work)
    if chatting and raw:
        raise BadRequest("--raw continues a PROMPT; a chat needs the template")
    if chatting and work.batch != 1:
        raise BadRequest("a chat is one sequence: --batch is for a PROMPT")
    from penstock.serve.planning import describe
    from penstock.serve.recording import ANSWERS, recording
    from penstock.spec import answers

    with tracing(trace, f"penstock run {model}") as traced, writing(record, "--record", ANSWERS) as keep:
        text = "" if chatting else read_prompt(prompt)
        source = packed_model(model, weights, machine, cache_limit, chat=not raw)
        if keep is not None and not describe(source.folder, verify=not machine.no_verify)[0].is_routed:
            raise BadRequest(f"--record keeps what routers say, and {source.folder} has none")
        from penstock.serve.tokenizer import Tokenizer

        # Opened before the weights are loaded: a tokenizer that is refused should not wait for them.
        tokenizer = Tokenizer.open(source.folder, ask.host_memory_bytes, not machine.no_verify, spare)
        ids = [] if chatting else _encoded(tokenizer, text, raw)
        params = sampling.params(tokenizer.generation_config, work)
        if chatting:
            ask = work.ask(machine, output_tokens=sampling.max_tokens or ask.output_tokens)
        else:
            ask = work.ask(machine, max(1, len(ids)), params.max_tokens)
        with (
            loaded(source, ask, machine, plan, traced, tokenizer) as engine,
            recording(engine) if keep is not None else contextlib.nullcontext() as recorder,
        ):
            if chatting:
                note("Ctrl-D ends, /new starts over")
                chat(engine, params, _typed_lines())
            else:
                answer(engine, ids, params, as_json, work.batch)
        if keep is not None and recorder is not None:
            keep(answers.dumps(recorder.answers()))


def answer(
    engine: Engine, prompt: list[int], params: SamplingParams, as_json: bool, count: int = 1, lead: str = ""
) -> None:
    """Generates `count` answers to a prompt (token ids). Prints `lead`, the text as it comes and a line of speed, or
    else the JSON object. Raises as `Engine.generate`."""
    if count > 1:
        _answer_together(engine, prompt, params, as_json, count)
        return
    if as_json:
        answers = engine.generate([prompt], params)
        engine.keep(answers[0])
        _print_report(engine, answers, engine.prediction)
        return
    generation = _print_stream(engine, prompt, params, lead)
    engine.keep(generation)
    _tell(engine, generation, engine.prediction)


def _answer_together(engine: Engine, prompt: list[int], params: SamplingParams, as_json: bool, count: int) -> None:
    from penstock.serve.together import Together

    together = Together(engine, prompt, params, count)
    with contextlib.nullcontext() if as_json else live(engine, lambda: len(together.reads), streams=False):
        answers = together.answers()
    together.keep(answers)
    if as_json:
        _print_report(engine, answers, together.prediction)
        return
    print("\n\n".join(answered.text for answered in answers), flush=True)
    if found := sum(answered.cached_tokens for answered in answers):
        note(f"of the {count * len(prompt)} tokens of {count} prompts {found} were read once for several answers")
    _tell(engine, answers[0], together.prediction)


def _print_report(engine: Engine, answers: list[Generation], prediction: Prediction) -> None:
    from penstock.serve.generation import report_all
    from penstock.serve.run_bound import share_of_bound

    print_json(report_all(answers, prediction, share_of_bound(engine.session, answers[0])))


def _tell(engine: Engine, generation: Generation, prediction: Prediction) -> None:
    """Prints measured speed beside predicted, and says so where the context cut the answer."""
    if generation.context_full:
        most = engine.plan.target.spec.max_positions
        room = generation.context < most
        more = f"--context N makes room for more, up to {most}" if room else "it is the model's longest"
        note(f"the answer ends here because the context of {generation.context} tokens is full: {more}")
    note(speed_line(generation, prediction))


def read_prompt(prompt: str | None) -> str:
    """PROMPT, or all of standard input without its last newline. Raises BadRequest where that is too long or not
    UTF-8."""
    if prompt is not None:
        return prompt
    from penstock.store.files import MAX_TEXT_BYTES

    try:
        text = sys.stdin.read(MAX_TEXT_BYTES + 1)
    except UnicodeDecodeError:
        raise BadRequest("the prompt on standard input is not UTF-8 text") from None
    if len(text) > MAX_TEXT_BYTES:
        raise BadRequest(f"the prompt on standard input does not end within {format_bytes(MAX_TEXT_BYTES)}")
    return text.removesuffix("\n")


def chat(engine: Engine, params: SamplingParams, lines: Iterator[str]) -> None:
    """Runs a conversation. `lines`: the user's turns. The line `/new` starts over. A turn whose answer fails by an
    error that the user can mend is taken back."""
    tokenizer = engine.tokenizer
    if not tokenizer.has_chat_template:
        note(f"{_NO_TEMPLATE}: it reads plain lines of User and Assistant")
        params = dataclasses.replace(params, stop=(*params.stop, _NEXT_TURN))
    messages: list[dict[str, Any]] = []
    for line in lines:
        if not line.strip():
            continue
        if line.strip() == "/new":
            messages.clear()
            continue
        messages.append({"role": "user", "content": line})
        try:
            generation = _print_stream(engine, tokenizer.encode_chat(messages), params)
        except PenstockError as error:
            if error.exit_code != 2:
                raise
            messages.pop()
            note(f"{error.message} (/new starts over)")
            continue
        messages.append({"role": "assistant", "content": generation.text})
        _tell(engine, generation, engine.prediction)


def _encoded(tokenizer: Tokenizer, text: str, raw: bool) -> list[int]:
    """The ids of a prompt, by the chat template unless `raw`."""
    if not raw and tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    if not raw:
        note(f"{_NO_TEMPLATE}: it continues the prompt as it stands")
    return tokenizer.encode(text)


def _print_stream(engine: Engine, ids: list[int], params: SamplingParams, lead: str = "") -> Any:
    on_terminal = sys.stdout.isatty()

    def chunks() -> int:
        return -(-(len(ids) - engine.holds(ids)) // engine.plan.chunk_rows)

    with live(engine, chunks, streams=True) as shown:
        if lead:
            shown.write(lead)
        for piece in engine.stream(ids, params):
            shown.write(piece.translate(_CONTROLS) if on_terminal else piece)
    print(flush=True)
    return engine.last


def _typed_lines() -> Iterator[str]:
    """The lines that the user types until Ctrl-D, with line editing where the platform has it."""
    ask: Callable[[str], str] = input
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (its import makes `input` edit lines)
    else:
        ask = _ask_on_stderr  # the answers go to a file, and the "> " should not
    while True:
        try:
            yield ask("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _ask_on_stderr(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
