"""Defines the flags that commands share, in groups. A command that takes `machine: Machine` has all of its flags
(`flags`)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from penstock.cli.cache_flag import cache_folder
from penstock.cli.flags import flag
from penstock.cli.output import note
from penstock.errors import BadRequest, BrokenModel
from penstock.spec.ask import Ask, check_device
from penstock.units import parse_bytes

if TYPE_CHECKING:
    from penstock.hubs.where import Where
    from penstock.serve.sampling import SamplingParams
    from penstock.spec.plan import Plan

DEFAULT_MAX_TOKENS = 128
GROWING = -1  # of --context: as many tokens as cost no speed

MODEL_HELP = (
    "A packed model, a model's folder, a GGUF file, org/name[:revision][/file.gguf] or org/name:Q4_K_M on the Hub,"
    " ollama:NAME or lmstudio:NAME (`penstock import` lists these), or tale-llama, which is bundled"
)
Model = Annotated[str, Argument(metavar="MODEL", help=f"{MODEL_HELP}.")]
# For commands that read no weights.
Shape = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help=f"{MODEL_HELP}; a config.json or a bundled shape's name.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print one JSON object as the last line of stdout.")]
Weights = Annotated[
    str | None,
    Option("--weights", metavar="FORMAT", help="float32, bfloat16, float16, int8 or int4; default the checkpoint's."),
]
_CACHE_HELP = "Packed models and machine files; default $XDG_CACHE_HOME/penstock, or ~/.cache/penstock."
CacheName = Annotated[str | None, Option("--cache", metavar="DIR", help=_CACHE_HELP)]
CacheLimit = Annotated[
    str | None,
    Option(
        "--cache-limit",
        metavar="SIZE",
        help="Packed models in the cache take at most so much: the longest unused are removed.",
    ),
]


@dataclass(frozen=True)
class Machine:
    """What penstock may use."""

    device: str = flag("--device", "NAME", "auto, cuda, none or emulated.", "auto")
    device_memory: str | None = flag("--device-memory", "SIZE", "Limit of device memory, such as 6GiB.")
    host_memory: str | None = flag("--host-memory", "SIZE", "Limit of the whole process, such as 12GiB.")
    resident: str | None = flag(
        "--resident", "SIZE", "At most so many bytes of weights stay in memory; the rest streams."
    )
    threads: int | None = flag("--threads", "N", "CPU threads; default and at most: all CPUs allowed.", min=1, max=4096)
    isa: str | None = flag(
        "--isa", "NAME", "CPU kernels of this family, such as avx2; default the best that the processor has."
    )
    exact: bool = flag(
        "--exact",
        None,
        "Multiply quantised weights with float32 activations, not with int8 ones, and a quantised"
        " cache with float32 numbers, not with rounded ones.",
        False,
    )
    no_verify: bool = flag(
        "--no-verify", None, "Do not compare what is read of a packed model with its checksums.", False
    )
    cache: str | None = flag("--cache", "DIR", _CACHE_HELP)

    def prepare(self) -> None:
        """Checks --device and --isa, notes where --threads is more than there can be, and keeps numpy from starting
        threads. Must be called before anything imports numpy. Raises BadRequest."""
        check_device(self.device)
        quiet_blas()
        if self.isa is not None:
            from penstock.kernels.cpu import nameable

            if self.isa not in nameable():
                raise BadRequest(f"--isa {self.isa}: this processor and build have {', '.join(nameable())}")
            note(f"{self.isa} kernels: asked for, of {', '.join(nameable())} here")
        if self.threads is not None and self.threads != self.usable_threads:
            note(f"--threads {self.threads}: this process may use {self.usable_threads} CPUs and has as many threads")

    @property
    def usable_threads(self) -> int:
        """--threads, but at most one for each CPU that this process may use, which is also the default."""
        from penstock.runtime import host

        return host.usable_threads(self.threads)

    @property
    def host_memory_bytes(self) -> int | None:
        """The size of --host-memory. Raises BadRequest."""
        return _size(self.host_memory, "--host-memory")

    @property
    def cache_folder(self) -> Path:
        """The folder of --cache. Raises BadRequest."""
        return cache_folder(self.cache)

    @property
    def named_cache(self) -> Path | None:
        """The folder of --cache; None where it is not given. Raises BadRequest."""
        return self.cache_folder if self.cache else None


@dataclass(frozen=True)
class Workload:
    """What the plan is for."""

    kv: str | None = flag(
        "--kv",
        "FORMAT",
        "KV cache in float32, bfloat16, float16, int8 or int4; default 16 bits, or 32 for a float32 model.",
    )
    kv_home: str | None = flag(
        "--kv-home", "TIER", "memory or disk; default memory, and the disk for what does not fit."
    )
    sparsity: str = flag(
        "--sparsity",
        "MODE",
        "What is done about neurons that do not fire: off; exact, which leaves out what their zeros multiply; or"
        " predict, which computes those alone that predictors call active (lossy, see train-predictors); or threshold,"
        " for which small activations are zeros (lossy, see profile --below). auto is exact for models with ReLU.",
        "auto",
    )
    attention: str = flag(
        "--attention",
        "MODE",
        "full, or top-k:SHARE: of the positions that a query sees, those with the best scores alone count, and no other"
        " values are read (lossy). KV lies in memory then, where attention runs.",
        "full",
    )
    batch: int = flag("--batch", "N", "Sequences at once.", 1, min=1)
    prompt_tokens: int | None = flag(
        "--prompt-tokens", "N", "Expected prompt length; default 64 or the prompt's.", min=1
    )
    output_tokens: int | None = flag(
        "--output-tokens", "N", "Expected answer length; default 64 or --max-tokens.", min=1
    )
    context: int | None = flag(
        "--context",
        "N",
        "KV room in tokens; default the model's maximum, at most 4096. -1 is as many as cost no speed.",
        min=GROWING,
    )
    objective: str = flag("--objective", "NAME", "latency or throughput.", "latency")

    @property
    def named_context(self) -> int | None:
        """The tokens of --context; None where it is not given, or grows. Raises BadRequest for 0."""
        if self.context == 0:
            raise BadRequest("'--context' 0: it should be 1 or more, or -1 for as many tokens as cost no speed")
        return None if self.context == GROWING else self.context

    def sparsity_of(self, plan: Plan | None) -> str:
        """What is done about neurons that do not fire: as a given plan says, or else as the flag does."""
        return self.sparsity if plan is None else plan.sparsity

    def refuse_sizes(self, command: str) -> None:
        """Raises BadRequest if a flag names a size of the work. `command`: what it does with a text in windows of 512
        tokens, for which all sizes are settled."""
        if self.context is not None or self.batch != 1 or self.prompt_tokens or self.output_tokens:
            raise BadRequest(
                f"{command} one window of 512 tokens at a time; --context, --batch and lengths are settled"
            )

    def ask(self, machine: Machine, prompt_tokens: int = 64, output_tokens: int = 64) -> Ask:
        """The request that these flags and `machine`'s make. `prompt_tokens`, `output_tokens`: count where no flag
        gives them. Raises BadRequest."""
        return Ask(
            prompt_tokens=self.prompt_tokens or prompt_tokens,
            output_tokens=self.output_tokens or output_tokens,
            batch=self.batch,
            context=self.named_context,
            grow_context=self.context == GROWING,
            objective=self.objective,
            host_memory_bytes=machine.host_memory_bytes,
            device_memory_bytes=_size(machine.device_memory, "--device-memory"),
            resident_bytes=_size(machine.resident, "--resident"),
            kv=self.kv,
            kv_home=self.kv_home,
            sparsity=self.sparsity,
            attention=self.attention,
            use_device=machine.device in ("cuda", "emulated"),
        )


@dataclass(frozen=True)
class SharedWorkload(Workload):
    """What the plan is for, where sequences may share KV pages."""

    kv_tokens: int | None = flag(
        "--kv-tokens",
        "N",
        "KV room in tokens, of all sequences together; serve takes --batch × (prompt + output), plan whole contexts.",
        min=1,
    )

    def ask(self, machine: Machine, prompt_tokens: int = 64, output_tokens: int = 64) -> Ask:
        return dataclasses.replace(super().ask(machine, prompt_tokens, output_tokens), kv_tokens=self.kv_tokens)


TraceName = Annotated[
    str | None,
    Option("--trace", metavar="FILE", help="Also write what each lane did when, for ui.perfetto.dev."),
]
Why = Annotated[
    bool, Option("--why", help="Also say what the plan and its prediction come from, and each rate that they take.")
]
PlanFile = Annotated[
    str | None, Option("--plan", metavar="FILE", help="Run this plan, made by `penstock plan --json`, not a new one.")
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; what is not named comes from the model's generation_config.json, else greedy."""

    max_tokens: int | None = flag(
        "--max-tokens",
        "N",
        f"Longest answer; default {DEFAULT_MAX_TOKENS}, or --output-tokens. run: -1 goes on until the context ends.",
    )
    temperature: float | None = flag("--temperature", "X", "0 is greedy; default the model's own, else 0.")
    top_k: int | None = flag("--top-k", "N", "Draw from the best N tokens only; 0 is off.")
    top_p: float | None = flag("--top-p", "X", "Draw from the best tokens that reach this probability.")
    min_p: float | None = flag("--min-p", "X", "Drop tokens less likely than this share of the best.")
    repetition_penalty: float | None = flag(
        "--repetition-penalty", "X", "Above 1 makes tokens seen before less likely."
    )
    stop: list[str] | None = flag("--stop", "TEXT", "End the answer before this text; may be repeated.")  # noqa: RUF009
    seed: int | None = flag("--seed", "N", "Makes a draw repeatable.")
    ignore_eos: bool = flag("--ignore-eos", None, "Go on past the end of text, to --max-tokens.", False)

    def params(self, generation_config: dict[str, Any], work: Workload | None = None) -> SamplingParams:
        """The parameters of these flags and the model's generation_config.json. Raises BadRequest, BrokenModel."""
        from penstock.serve.sampling import with_model_defaults

        named = dataclasses.asdict(self)
        if self.max_tokens is None:
            named["max_tokens"] = (work and work.output_tokens) or DEFAULT_MAX_TOKENS
        return with_model_defaults(generation_config, **named)

    def from_model(self, generation_config: dict[str, Any]) -> list[str]:
        """The names of the values in `params` that come from the model's generation_config.json."""
        from penstock.serve.sampling import from_model

        return from_model(generation_config, **dataclasses.asdict(self))


def given_plan(file: str | None, machine: Machine, work: Workload) -> Plan | None:
    """The plan of --plan; None without that flag. Raises BadRequest where it is given beside a flag that the plan
    already decides, and where the file is no plan."""
    if file is None:
        return None
    flags = {"--kv": work.kv, "--kv-home": work.kv_home, "--context": work.context, "--resident": machine.resident}
    flags |= {"--sparsity": work.sparsity != "auto", "--attention": work.attention != "full"}
    flags |= {"--kv-tokens": work.kv_tokens} if isinstance(work, SharedWorkload) else {}
    if given := [name for name, value in flags.items() if value]:
        raise BadRequest(f"--plan says what {', '.join(given)} would: give one or the other")
    return _read_plan(file)


def _read_plan(file: str) -> Plan:
    """Reads a file with the JSON object of `penstock plan --json`, or with the plan alone. Raises BadRequest."""
    import json

    from penstock.spec import plan as plans

    text = read_text(file)
    try:
        data = json.loads(text.removeprefix("\ufeff"))  # some editors begin files with a byte-order mark
        if isinstance(data, dict) and isinstance(data.get("plan"), dict):
            text = json.dumps(data["plan"])
    except (ValueError, RecursionError):
        pass  # `plans.loads` says what is wrong
    return plans.loads(text, file)


def as_path(text: str) -> Path:
    """A path as the user typed it, with ~ expanded. ~NAME stays as it is where there is no such user, and so is not
    found."""
    return Path(os.path.expanduser(text))


def where() -> Where:
    """The places of models that are no paths, as the environment names them. huggingface_hub reads its own variables
    itself (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN)."""
    from penstock.hubs.where import Where, ollama_folders

    named = os.environ.get("OLLAMA_MODELS", "")
    return Where(ollama=(Path(named), *ollama_folders(Where()))) if os.path.isabs(named) else Where()


def file_to_write(name: str, flag: str) -> Path:
    """The file that the user named for an output, with links followed. It may be there already.

    Raises BadRequest for a name that an output cannot replace: a folder, a pipe, a device, and the file that this
    process reads its input from or prints to.
    """
    path = as_path(name)
    try:
        file = path.resolve()
        before = path.stat() if path.exists() else None
        if file.name and (
            before is None or (stat.S_ISREG(before.st_mode) and not _is_stream(before) and file.exists())
        ):
            return file
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise BadRequest(f"{flag} {name} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    raise BadRequest(f"{flag} {name!r} is not a file that can be written")


def _is_stream(status: os.stat_result) -> bool:
    """Whether a file is our standard input, output or error. `… --trace FILE > FILE` would lose one of the two."""
    for fd in range(3):
        with contextlib.suppress(OSError):  # the stream is closed
            if os.path.samestat(os.fstat(fd), status):
                return True
    return False


def read_text(file: str, max_bytes: int | None = None) -> str:
    """The text of a file that the user named. `max_bytes`: None for the most that a text may have. Raises BadRequest
    where it cannot be read, is too long or not UTF-8."""
    from penstock.store.files import MAX_TEXT_BYTES, load_text

    try:
        return load_text(as_path(file), max_bytes or MAX_TEXT_BYTES)
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    except BrokenModel as error:
        raise BadRequest(error.message) from None


def quiet_blas() -> None:
    """Keeps numpy's BLAS to one thread. It starts its threads when it is loaded, and each costs work space. Our kernels
    have threads of their own."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def _size(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_bytes(text, flag)
