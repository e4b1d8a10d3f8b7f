"""`penstock profile`: counts the experts that a text asks for, or the neurons that it fires."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import CacheLimit, Json, Machine, Model, Weights, Workload, as_path, read_text
from penstock.cli.output import note, print_json, progress
from penstock.cli.text_argument import TextFile
from penstock.errors import BadRequest
from penstock.spec.ask import LOSSY

if TYPE_CHECKING:
    from penstock.serve.engine import Engine
    from penstock.serve.source import Source
    from penstock.spec.ask import Ask
    from penstock.spec.model import ModelSpec
    from penstock.spec.profile import Profile

_SHOWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # sizes of caches, as shares of a layer's experts

Below = Annotated[
    float | None,
    Option(
        "--below",
        metavar="SHARE",
        help="Of a model without ReLU: find below which level this share of each"
        " layer's activations is, for --sparsity threshold.",
    ),
]
Beside = Annotated[
    str | None,
    Option(
        "--beside",
        metavar="FILE",
        help="Of a model with ReLU: another text, or its profile.json. Tells how many of each layer's hottest 20 %"
        " of neurons both share, and is not kept. Default: the profile of another text that is there so far.",
    ),
]


def profile(
    model: Model,
    file: TextFile,
    machine: Machine,
    work: Workload,
    weights: Weights = None,
    tokens: Annotated[int, Option("--tokens", min=1, help="Read at most so many tokens of the text.")] = 16384,
    below: Below = None,
    beside: Beside = None,
    cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:
    """Which experts of a model a text asks for, or which neurons it fires.

    The text is read in windows of 512 tokens. What its routers said, or which neurons of a model with ReLU fired, is
    kept beside the packed model. `plan` and `run` predict by it from then on. Of neurons it tells how few of them make
    most activations.
    """
    machine.prepare()
    work.refuse_sizes("profile reads")
    if work.sparsity in LOSSY:
        raise BadRequest(f"--sparsity {work.sparsity} leaves some out: a profile says what a model fires by itself")
    text, ask = read_text(file), work.ask(machine)
    other = None if beside is None else _text_or_profile(beside)
    from penstock.serve import levels, profiling
    from penstock.serve.windows import in_windows
    from penstock.store.profile_file import keep, kept, require_place

    require = profiling.require_counted if below is None else partial(levels.require, below)
    # Levels are worked out from the copy's files, so --below packs first.
    source = packed_model(model, weights, machine, cache_limit, unpacked=below is None, require=require)
    spec = source.spec(not machine.no_verify)
    require(spec, str(source.called))
    if source.to_write is None:
        require_place(source.folder)
    if beside is not None and (below is not None or not spec.fires):
        raise BadRequest("--beside compares which neurons of a ReLU fire on two texts; this model has none")
    before = kept(source.folder, spec) if spec.fires else None
    with _engine(source, in_windows(ask, spec), machine) as engine, progress() as tell:
        name = Path(file).name
        if below is None:
            seen = profiling.profile(engine, text, name, tokens, tell)
        else:
            seen = levels.profile(engine, text, name, below, tokens, tell)
        if beside is not None and other is not None:
            before = _profile_of(engine, other, beside, tokens, spec)
        engine.write_copy(tell)
        file_kept = keep(seen, engine.packed_folder)
    note_kept = f"kept in {file_kept}: `plan` and `run` of this model go by it"
    said = {"tokens": seen.tokens, "text_sha256": seen.text_sha256, "file": str(file_kept)}
    if seen.levels:
        _tell_levels(seen, said, None if as_json else note_kept)
    elif seen.neurons:
        another = before is not None and (beside is not None or before.text_sha256 != seen.text_sha256)
        _tell_neurons(seen, before if another else None, said, None if as_json else note_kept)
    else:
        _tell_experts(seen, said, None if as_json else note_kept)


@contextmanager
def _engine(source: Source, ask: Ask, machine: Machine) -> Iterator[Engine]:
    """Loads the model until the block ends. It is packed first where no copy could be written later, which a profile is
    kept beside. Raises as `loaded`."""
    with ExitStack() as stack:
        stack.callback(source.close)
        if source.to_write is not None and source.to_write.no_copy:
            with progress() as tell:
                source = source.packed(tell)
            stack.callback(source.close)
        stack.enter_context(source.naming())
        tokenizer = source.open_tokenizer(ask.host_memory_bytes, not machine.no_verify)
        yield stack.enter_context(loaded(source, ask, machine, tokenizer=tokenizer))


def _tell_experts(seen: Profile, said: dict[str, object], note_kept: str | None) -> None:
    """As JSON, or after a note as a table."""
    from penstock.spec.profile import hit_rates

    rates = hit_rates(seen)
    experts = len(rates) - 1
    if note_kept is None:
        print_json(said | {"hit_rates": rates})
        return
    note(note_kept)
    print(f"{seen.tokens} tokens; a cache of so many of {experts} experts a layer would have had")
    for share in _SHOWN:
        slots = round(share * experts)
        print(f"  {slots:4} experts ({share:.0%})  {rates[slots]:.1%}")


def _tell_levels(seen: Profile, said: dict[str, object], note_kept: str | None) -> None:
    """As JSON, or after a note as a table."""
    if note_kept is None:
        layers = [{"layer": each.layer, "level": each.level, "kept": each.kept} for each in seen.levels]
        print_json(said | {"layers": layers})
        return
    note(note_kept)
    print(f"{seen.tokens} tokens; --sparsity threshold takes for zeros what is below")
    print("layer  level    above it")
    for each in seen.levels:
        print(f"  {each.layer:3}  {each.level:7.4f}  {each.kept[0]:8.1%}")


def _text_or_profile(file: str) -> str:
    """What the file of --beside holds: a profile, which may be longer than texts may be, or a text. Raises
    BadRequest."""
    from penstock.spec.profile import BEGINS
    from penstock.store.profile_file import MAX_BYTES

    held = read_text(file, MAX_BYTES)
    return held if BEGINS.match(held) else read_text(file)


def _profile_of(engine: Engine, text: str, file: str, tokens: int, spec: ModelSpec) -> Profile:
    """The profile in the file of --beside, or of the text there, of which at most `tokens` are read. Raises BadRequest
    for a profile of another model, and as `profiling.profile`."""
    from penstock.serve import profiling
    from penstock.spec.profile import BEGINS
    from penstock.store.profile_file import read

    if BEGINS.match(text):
        return read(as_path(file), spec)
    with progress() as tell:
        return profiling.profile(engine, text, Path(file).name, tokens, tell)


def _tell_neurons(seen: Profile, beside: Profile | None, said: dict[str, object], note_kept: str | None) -> None:
    """As JSON, or after a note as a table. `beside`: of another text, to compare with."""
    from penstock.planner.firing import measured
    from penstock.spec.hottest import MADE, made_by, made_by_all, same_hottest
    from penstock.spec.profile import FIRED_TOGETHER

    together = measured(seen)
    assert together is not None
    made, every = [made_by(layer.counted()) for layer in seen.neurons], made_by_all(seen)
    same = None if beside is None else same_hottest(seen, beside)
    if note_kept is None:
        names = [f"hot_{share:.0%}".removesuffix("%") for share in MADE]
        layers = [
            {"layer": each.layer, "fired": each.fired[0], **dict(zip(names, shares, strict=True))}
            for each, shares in zip(seen.neurons, made, strict=True)
        ]
        for layer, share in zip(layers, same or (), strict=False):
            layer["same_hottest"] = share
        compared = None
        if beside is not None and same is not None:
            compared = {"name": beside.name, "text_sha256": beside.text_sha256, "tokens": beside.tokens}
            compared |= {"same_hottest": sum(same) / len(same)}
        fired = dict(zip(FIRED_TOGETHER, together.shares, strict=True))
        print_json(
            said | {"fired": fired, **dict(zip(names, every, strict=True)), "beside": compared, "layers": layers}
        )
        return
    note(note_kept)
    print(f"{seen.tokens} tokens; a token fires {together.shares[0]:.1%} of the neurons, and so many tokens in a row")
    for tokens, share in zip(FIRED_TOGETHER[1:], together.shares[1:], strict=True):
        print(f"  {tokens:4} tokens  {share:.1%}")
    print("the hottest neurons that make this share of a layer's activations, and of the whole model's")
    print(f"layer   fires{''.join(f'{share:8.0%}' for share in MADE)}{'' if same is None else '    same'}")
    rows = [(f"{each.layer:5}", each.fired[0], shares) for each, shares in zip(seen.neurons, made, strict=True)]
    alike = ("",) * (len(rows) + 1) if same is None else tuple(f"{x:8.1%}" for x in (*same, sum(same) / len(same)))
    for (name, fires, shares), last in zip((*rows, ("  all", together.shares[0], every)), alike, strict=True):
        print(f"{name}{fires:8.1%}{''.join(f'{share:8.1%}' for share in shares)}{last}")
    if beside is not None:
        print(
            f"same: of a layer's hottest 20 % of neurons, so many are among its hottest 20 % in {beside.tokens} tokens"
            f" of {beside.name} too (20 % by chance)"
        )
