"""`penstock run`: answers a prompt, or chats."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from penstock.cli.chat import Chat, opening, typed_lines
from penstock.cli.flags import flag
from penstock.cli.live import live
from penstock.cli.loading import When, loaded, packed_model, tracing
from penstock.cli.options import (
    CacheLimit,
    Json,
    Machine,
    Model,
    PlanFile,
    Sampling,
    TraceName,
    Weights,
    Why,
    Workload,
    given_plan,
    read_text,
)
from penstock.cli.output import note, print_json, say_fitted
from penstock.cli.streaming import NO_TEMPLATE, print_stream, promise, tell_speed
from penstock.cli.writing import writing
from penstock.errors import BadRequest
from penstock.spec.ask import DEFAULT_CONTEXT
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.planner.predict import Prediction
    from penstock.serve.api.chats import ChatPrompt
    from penstock.serve.engine import Engine
    from penstock.serve.generation import Generation
    from penstock.serve.renewal import Renewed
    from penstock.serve.sampling import SamplingParams
    from penstock.serve.tokenizer import Tokenizer
    from penstock.spec.ask import Ask
    from penstock.spec.plan import Plan

UNTIL_END = -1  # the value of --max-tokens that means the context's end
Prompt = Annotated[str | None, Argument(metavar="PROMPT", help="Default: standard input, or a chat at a terminal.")]
Record = Annotated[
    str | None,
    Option(
        "--record",
        metavar="FILE",
        help="Also keep what routers said, or which neurons of a ReLU fired, for `penstock plan --answers`.",
    ),
]


@dataclass(frozen=True)
class Asking:
    """What the model is told beside PROMPT, and how."""

    prompt_file: str | None = flag("--prompt-file", "FILE", "Take the prompt from this file of UTF-8 text.")
    image: str | None = flag("--image", "FILE", "", hidden=True)
    system_text: str | None = flag("--system", "TEXT", "What the model is told before the first turn.")
    no_thinking: bool = flag(
        "--no-thinking",
        None,
        "Do not show what a reasoning model thinks; a terminal shows it dimmed. --json and --batch show all.",
        False,
    )
    raw: bool = flag("--raw", None, "Continue the prompt as it stands, without the chat template.", False)

    def prompt(self, named: str | None) -> str | None:
        """PROMPT (`named`) or the text of --prompt-file; None without either. Raises BadRequest if both are given, and
        for an image."""
        if self.image is not None:
            raise BadRequest(f"--image {self.image}: penstock runs the text part of models, and reads no images")
        if self.prompt_file is None:
            return named
        if named is not None:
            raise BadRequest("--prompt-file and PROMPT are both a prompt: give one or the other")
        return read_text(self.prompt_file).removesuffix("\n")


def run(
    model: Model, machine: Machine, work: Workload, sampling: Sampling, prompt: Prompt = None,
    asking: Asking = Asking(), weights: Weights = None, plan_file: PlanFile = None, trace: TraceName = None,
    record: Record = None, cache_limit: CacheLimit = None, why: Why = False, as_json: Json = False,
) -> None:  # fmt: skip
    """One answer to PROMPT, or a chat; streams as it comes. Packs a checkpoint on first use.

    What no sampling flag names comes from the model's generation_config.json; without one the best token is
    always taken.
    """
    prompt = asking.prompt(prompt)
    machine.prepare()
    from penstock.serve.confined import Child

    spare = Child()  # it comes up while this process imports the rest
    plan = given_plan(plan_file, machine, work)
    chatting = prompt is None and not as_json and sys.stdin.isatty()
    ask = work.ask(machine)
    _refuse_contradictions(work, sampling, ask, chatting, asking)
    from penstock.serve.recording import ANSWERS, recording, require_answers
    from penstock.spec import answers

    with (
        contextlib.ExitStack() as at_end,
        tracing(trace, f"penstock run {model}") as traced,
        writing(record, "--record", ANSWERS) as keep,
    ):
        text = "" if chatting else read_prompt(prompt)
        # A plan of a file is for a packed model, and so are answers.
        unpacked = plan is None and record is None
        sparsity = work.sparsity_of(plan)
        more = None if record is None else require_answers
        source = packed_model(model, weights, machine, cache_limit, not asking.raw, unpacked, sparsity, plan, more)
        at_end.callback(source.close)  # what is refused before an engine has it leaves no small files behind
        if more is not None:
            more(source.spec(not machine.no_verify), str(source.called))
        _import_ahead("penstock.serve.engine")
        # Opened before the weights are loaded: a tokenizer that is refused should not wait for them.
        with source.naming():
            tokenizer = source.open_tokenizer(ask.host_memory_bytes, not machine.no_verify, spare)
            asked = None if chatting else _encoded(tokenizer, text, asking.raw, asking.system_text)
        ids = [] if asked is None else asked.ids
        if sampling.max_tokens == UNTIL_END:
            positions = source.spec(not machine.no_verify).max_positions
            sampling = _until_end(sampling, len(ids), work, plan, positions)
        params = sampling.params(tokenizer.generation_config, work)
        if chatting:
            ask = work.ask(machine, output_tokens=sampling.max_tokens or ask.output_tokens)
        else:
            ask = work.ask(machine, max(1, len(ids)), params.max_tokens)
        # Whoever reads JSON, a trace or a record wants figures of passes that nothing was done beside.
        ahead = () if as_json or chatting or work.batch > 1 or traced is not None or keep is not None else ids
        copy: When = "first" if chatting else "after"
        with (
            source.naming(),  # the tokenizer may refuse what the answer asks of it
            loaded(source, ask, machine, plan, traced, tokenizer, prompt=ahead, copy=copy) as engine,
            recording(engine) if keep is not None else contextlib.nullcontext() as recorder,
        ):
            if why:
                say_why(engine)
            if chatting:
                _chat(engine, params, asking, machine)
            else:
                named = sampling.from_model(tokenizer.generation_config)
                answer(engine, ids, params, as_json, work.batch, "", named, asked, not asking.no_thinking)
        if keep is not None and recorder is not None:
            keep(answers.dumps(recorder.answers()))


def _refuse_contradictions(work: Workload, sampling: Sampling, ask: Ask, chatting: bool, asking: Asking) -> None:
    """Raises BadRequest for flags that are wrong or do not go together, before a first use packs for minutes."""
    (replace(sampling, max_tokens=1) if sampling.max_tokens == UNTIL_END else sampling).params({}, work)
    if chatting and asking.raw:
        raise BadRequest("--raw continues a PROMPT; a chat needs the template")
    if asking.system_text is not None and asking.raw:
        raise BadRequest("--raw continues a PROMPT as it stands: --system needs the template")
    if sampling.max_tokens == UNTIL_END and ask.grow_context:
        raise BadRequest("--max-tokens -1 goes on until the context ends: --context has to name it")
    if chatting and work.batch != 1:
        raise BadRequest("a chat is one sequence: --batch is for a PROMPT")


def _until_end(sampling: Sampling, prompt_tokens: int, work: Workload, plan: Plan | None, positions: int) -> Sampling:
    """The same with the longest answer that the context has room for: the plan's, or --context, or as many of the
    model's `positions` as plans have by themselves. The last token needs no room. A prompt that is too long is refused
    when the context is known for sure."""
    context = plan.context if plan is not None else work.named_context or min(positions, DEFAULT_CONTEXT)
    return replace(sampling, max_tokens=max(1, context - prompt_tokens + 1))


def _chat(engine: Engine, params: SamplingParams, asking: Asking, machine: Machine) -> None:
    note("/help lists commands, Ctrl-C ends an answer, Ctrl-D the chat")
    with typed_lines(machine.cache_folder) as lines:
        Chat(engine, params, asking.system_text, not asking.no_thinking).run(lines)


def _import_ahead(module: str) -> None:
    """Imports a module in a thread, while this one waits for the child that reads the tokenizer. 128 thousand tokens
    take that 0.2 s, and the engine's modules take 0.13 s. An import that fails here fails again where the module is
    needed."""

    def import_it() -> None:
        with contextlib.suppress(Exception):
            import_module(module)

    with contextlib.suppress(RuntimeError):  # no more threads may be started
        threading.Thread(target=import_it, name="penstock-imports").start()


def say_why(engine: Engine) -> None:
    """Prints to stderr where everything lies, and what the prediction comes from."""
    from penstock.planner import explain
    from penstock.planner.solve import settle_context
    from penstock.serve.lately import why

    table = explain.table(engine.solved, engine.ask, engine.machine, engine.band())
    lines = why(engine.lately, engine.solved, settle_context(engine.ask, engine.packed.spec))
    say_fitted("\n".join([table, *(f"· {line}" for line in lines)]))


def answer(
    engine: Engine, prompt: list[int], params: SamplingParams, as_json: bool, count: int = 1, lead: str = "",
    from_model: Sequence[str] = (), asked: ChatPrompt | None = None, thoughts: bool = True,
) -> None:  # fmt: skip
    """Generates `count` answers to a prompt (token ids). Prints `lead`, the text as it comes and a line of speed, or
    else the JSON object. `from_model`: which values of `params` come from the model's generation_config.json. `asked`:
    says how one answer is taken apart, and `thoughts` whether what is thought is shown. Raises as `Engine.generate`."""
    if count > 1:
        _answer_together(engine, prompt, params, as_json, count, from_model)
        return
    if as_json:
        renewed = engine.renew()
        answers = engine.generate([prompt], params)
        engine.keep(answers[0])
        _print_report(engine, answers, engine.prediction, params, from_model, renewed)
        return
    promised = promise(engine)
    try:
        if asked is not None and (not thoughts or sys.stdout.isatty()):
            params, reading = asked.ruled(params), asked.reading(params)
        else:
            reading = None  # a program that reads the output takes it apart
        generation = print_stream(engine, prompt, params, lead, reading, thoughts)
    except KeyboardInterrupt:
        print(flush=True)  # so that the shell's prompt stands on a line of its own
        raise
    engine.keep(generation)
    tell_speed(engine, generation, promised)


def _answer_together(
    engine: Engine, prompt: list[int], params: SamplingParams, as_json: bool, count: int, from_model: Sequence[str]
) -> None:
    from penstock.serve.together import Together

    together = Together(engine, prompt, params, count)

    def ahead() -> tuple[int, float]:
        return together.read_tokens, together.prediction.ttft_s

    with contextlib.nullcontext() if as_json else live(engine, ahead, streams=False):
        answers = together.answers()
    together.keep(answers)
    if as_json:
        _print_report(engine, answers, together.prediction, params, from_model)
        return
    print("\n\n".join(answered.text for answered in answers), flush=True)
    if found := sum(answered.cached_tokens for answered in answers):
        note(f"of the {count * len(prompt)} tokens of {count} prompts {found} were read once for several answers")
    tell_speed(engine, answers[0], together.prediction)


_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _print_report(
    engine: Engine, answers: list[Generation], prediction: Prediction, params: SamplingParams,
    from_model: Sequence[str], renewed: Renewed | None = None,
) -> None:  # fmt: skip
    """Prints the JSON object, with these fields beside the report's own:

    sampling             the values that were used, of flags and of the model's generation_config.json
    sampling_from_model  the names of the values that came from the latter
    renewed              the promise by the speed that disk and RAM had right before the answer
    rates                the rates that the plan took otherwise than measured
    loading              seconds until all weights that stay were loaded, and how many of these the system spent on
    making pages ready
    """
    from penstock.serve.generation import report_all
    from penstock.serve.run_bound import share_of_bound

    report = report_all(answers, prediction, share_of_bound(engine.session, answers[0]))
    today = None if renewed is None else renewed.report()
    print_json(
        {
            **report,
            "renewed": today,
            "loading": {"seconds": engine.session.ready_s, "pages_s": engine.session.pages_s},
            "rates": engine.lately.report(),
            "sampling": {name: getattr(params, name) for name in _SAMPLING},
            "sampling_from_model": from_model,
        }
    )


def read_prompt(prompt: str | None) -> str:
    """PROMPT, or all of standard input without its last newline. Raises BadRequest where that is empty, too long or not
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
    if not (text := text.removesuffix("\n")):
        raise BadRequest("the prompt is empty: standard input has none, and PROMPT or --prompt-file would give one")
    return text


def _encoded(tokenizer: Tokenizer, text: str, raw: bool, system: str | None) -> ChatPrompt:
    """A prompt, by the chat template unless `raw`. `system`: what stands before it. Raises BadRequest where there is no
    template for that."""
    from penstock.serve.api.chats import ChatPrompt, chat_of

    if not raw and tokenizer.has_chat_template:
        return chat_of(tokenizer, [*opening(system), {"role": "user", "content": text}], None)
    if system is not None:
        raise BadRequest(f"{NO_TEMPLATE}: --system cannot be told apart from the prompt")
    if not raw:
        note(f"{NO_TEMPLATE}: it continues the prompt as it stands")
    return ChatPrompt(tokenizer.encode(text))
