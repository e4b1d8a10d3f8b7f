#!/usr/bin/env python3
"""Trains the small reference models that penstock ships, from plain text to a Hugging Face folder, in one command.

    python tools/train_reference.py --arch llama     # from the project's root; writes penstock/assets/tale-llama/

Needs torch, tokenizers and safetensors. The tokenizer is trained with the model, on the same text. Nothing depends on
the clock: steps, order and seeds are fixed, so the same machine and torch version give the same weights again, bit by
bit. The folder's README.md (the model card) is written last, from figures measured on the files just saved.

Shapes: B windows, T positions, V vocabulary, N tokens of a stream.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from reference_model import ARCHITECTURES, Architecture, Model, from_checkpoint, to_checkpoint
from reference_opt import Opt
from reference_sparsity import sparsity_text
from reference_text import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    HELD_OUT,
    NOT_SCORED,
    Book,
    encode,
    read_books,
    train_tokenizer,
    windows,
)
from safetensors.torch import load, save
from tokenizers import Tokenizer
from torch import Tensor, nn

SEED = 20
STEPS = 3000  # 6.1 million tokens, two epochs: 34 minutes at the 3000 tokens/s of two cores
BATCH = 4  # windows: in so few epochs many small steps teach more than fewer large ones, and run as fast
PEAK_RATE = 3e-3
FINAL_SHARE = 0.05  # of the peak rate, at the last step
WARMUP = 200
WEIGHT_DECAY = 0.1
REPORT = 20  # steps from one line of progress to the next


def make_model(arch: Architecture) -> Model | Opt:
    return Opt(arch) if arch.model_type == "opt" else Model(arch)


def losses(model: Callable[[Tensor], tuple[Tensor, Tensor]], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Nats, summed over the scored positions; and how unevenly experts are used."""
    logits, uneven = model(inputs)  # [B, T, V]
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=NOT_SCORED, reduction="sum"), uneven


def batches(stream: Tensor, steps: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each epoch cuts the stream into windows at a new offset and shuffles them: every token is seen equally often."""
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(starts) < BATCH:
            offset = int(torch.randint(length, (), generator=generator))
            epoch = torch.arange(offset, len(stream) - length + 1, length)
            starts = torch.cat([starts, epoch[torch.randperm(len(epoch), generator=generator)]])
        yield windows(stream, starts[:BATCH], length)
        starts = starts[BATCH:]


def learning_rate(step: int, steps: int) -> float:
    """Linear to the peak, then a half cosine. Short trial runs warm up over a tenth of their steps."""
    warmup = min(WARMUP, max(1, steps // 10))
    if step < warmup:
        return PEAK_RATE * (step + 1) / warmup
    turn = (step - warmup) / max(1, steps - warmup)
    return PEAK_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * turn)) / 2)


@dataclass(frozen=True)
class Effort:
    """What a training run took. Where other programs share the cores, the fastest stretch says what they can do."""

    steps: int
    wall_seconds: float
    cpu_seconds: float
    fastest: float  # tokens/s over the best REPORT steps


def has_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32."""
    return device.type != "cpu" or "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def train(model: Model | Opt, stream: Tensor, steps: int, length: int, device: torch.device, compiled: bool) -> Effort:
    """Trains in place."""
    # 6.95 M parameters, 4 x 512 tokens a step, two cores with AVX-512 BF16: 2050 tokens/s in float32, 2950 with
    # bfloat16 autocast, 3560 compiled as well (for 40 s of compilation); this loop, optimizer and all, runs at 3000.
    # Cores without BF16 instructions imitate them: for tale-moe's 11.7 M parameters, all of which were computed for
    # every token then, 330 tokens/s in float32 and 136 with autocast (two busy cores). Sorted by expert, in float32 and
    # on two cores of its own, tale-moe trains at 2200.
    half = has_bfloat16(device)
    forward: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(model) if compiled else model
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    gains = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    smooth, fastest, warm, last = 0.0, 0.0, begin, begin
    for step, (inputs, targets) in enumerate(batches(stream, steps, length)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            nats, uneven = losses(forward, inputs.to(device), targets.to(device))
        loss = nats / targets.numel()
        optimizer.zero_grad()
        (loss + model.arch.balance * uneven).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        now = time.perf_counter()
        if step == 0:
            warm = last = now  # the first step compiles: rates count from here
        elif step % REPORT == 0 or step + 1 == steps:
            rate, left = step * targets.numel() / (now - warm), (steps - step - 1) * (now - warm) / step
            if step % REPORT == 0:
                fastest, last = max(fastest, REPORT * targets.numel() / (now - last)), now
            progress = f"step {step + 1}/{steps}  loss {smooth:.3f}  {rate:.0f} tokens/s  {left / 60:.1f} min left"
            print(progress, file=sys.stderr, flush=True)
    return Effort(steps, time.perf_counter() - begin, time.process_time() - cpu_begin, fastest)


@torch.inference_mode()
def mean_loss(model: Model | Opt, stream: Tensor, length: int) -> float:
    """Nats a token in float32, over windows that do not overlap: every token but bos is scored once."""
    padded = F.pad(stream, (0, -len(stream) % length), value=BOS_ID)  # bos is not scored
    device = next(model.parameters()).device
    total, scored = 0.0, 0
    for begin in range(0, len(padded), 8 * length):
        inputs, targets = windows(padded, torch.arange(begin, min(begin + 8 * length, len(padded)), length), length)
        total += losses(model, inputs.to(device), targets.to(device))[0].item()
        scored += int((targets != NOT_SCORED).sum())
    return total / scored


def unigram_loss(train_stream: Tensor, stream: Tensor, vocab: int) -> float:
    """Nats a token of a model that knows only how often each token occurs in the training text, plus one."""
    counts = torch.bincount(train_stream[train_stream != BOS_ID], minlength=vocab).double() + 1  # [V]
    return float(-(counts / counts.sum()).log()[stream[stream != BOS_ID]].mean())


@torch.inference_mode()
def sample(model: Model | Opt, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """A continuation at temperature 0.7 among the 40 likeliest tokens. Without a KV cache: it is made once."""
    generator = torch.Generator().manual_seed(SEED)
    device = next(model.parameters()).device
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        logits = model(torch.tensor([ids], device=device))[0][0, -1].cpu()  # [V]
        values, candidates = logits.topk(40)
        ids.append(int(candidates[torch.multinomial((values / 0.7).softmax(0), 1, generator=generator)]))
    return tokenizer.decode(ids)


def write(folder: Path, name: str, content: bytes) -> None:
    """Aside, then renamed: an interrupted run leaves the old file or the new one, nothing between."""
    aside = folder / f".{name}.part"
    aside.write_bytes(content)
    os.replace(aside, folder / name)


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def save_model(folder: Path, arch: Architecture, tokenizer: Tokenizer, model: Model | Opt) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.detach().cpu().bfloat16().contiguous() for name, weight in model.state_dict().items()}
    write(folder, "model.safetensors", save(to_checkpoint(arch, rounded), metadata={"format": "pt"}))
    write(folder, "config.json", as_json(arch.hf_config(BOS_ID, EOS_ID)))
    write(folder, "generation_config.json", as_json({"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}))
    write(folder, "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": arch.context,
        "clean_up_tokenization_spaces": False,
    }
    write(folder, "tokenizer_config.json", as_json(tokenizer_config))


def load_saved(folder: Path, arch: Architecture, device: torch.device) -> Model | Opt:
    """The model as a user gets it: the rounded weights of the file, computed with in float32."""
    weights = from_checkpoint(arch, load((folder / "model.safetensors").read_bytes()))
    model = make_model(arch)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.to(device).eval()


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# {name}

A small trained language model for penstock's demo, tests and examples. It has {parameters:.2f} M parameters,
model_type `{model_type}`, {ffn_kind} with hidden_act `{hidden_act}`, and {attention_kind} attention. It
writes what looks like old English prose and knows nothing: a model to run an engine with, not to ask questions of.

| | |
|---|---|
| layers × width | {layers} × {width} |
| attention | {heads} query heads, {kv_heads} key-value heads, {head_width} wide; {positions} |
| FFN | {ffn} |
| vocabulary | {vocab}, byte-level BPE trained on the same text; embedding and head tied |
| context | {context} tokens |
| weights | bfloat16, {megabytes:.1f} MB |

## How good it is

Losses of the rounded bfloat16 weights in this folder, computed in float32, over windows of {context} tokens that do not
overlap, each after a bos token; every token is scored once. The held-out text is the last {held_out:.0%} of every book
({held_out_tokens} tokens, {held_out_bytes} bytes); neither the model nor the tokenizer saw it in training.

| | nats per token | bits per byte |
|---|---|---|
| {name}, held-out text | **{loss:.4f}** | {bits:.4f} |
| unigram model, held-out text | {unigram:.4f} | {unigram_bits:.4f} |
| {name}, training text: as much of every book, just before its held-out end | {train_loss:.4f} | {train_bits:.4f} |

The unigram model knows how often each token occurs in the training text, with one added to every count.

"{prompt}", continued at temperature 0.7 among the 40 likeliest tokens:

{sample}
{sparsity}
## How it was made

    {command}

{steps} steps of {batch} windows of {context} tokens ({seen:.1f} million tokens, {epochs:.1f} epochs), AdamW, learning
rate {rate:g} after {warmup} steps of warm-up, falling along a cosine to {final:.0%} of it, weight decay {decay:g},
gradients clipped to norm 1, {precision}, seed {seed}; torch {torch}. Training took {minutes:.0f} minutes by the
clock and {cpu_minutes:.0f} minutes of processor time on {device}; its fastest stretch ran at {fastest:.0f} tokens/s, at
which the whole takes {best_minutes:.0f} minutes on cores of its own. The same torch on the same machine gives the same
weights again; another machine rounds otherwise and ends near the same loss.

## Data and licence

{train_tokens} training tokens ({train_bytes} bytes) from the {count} texts below, all in the public domain: Project
Gutenberg books without their headers and footers, and tiny Shakespeare. Prose was unwrapped, and typographic quotes and
dashes were made ASCII. SHA-256 of the cleaned text: `{digest}`.
The model is under the Apache License 2.0.

| file | title | bytes |
|---|---|---|
{books}
"""


def publish(folder: Path, arch: Architecture, books: list[Book], effort: Effort, device: torch.device) -> None:
    """Measures the files in the folder and writes their card."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_saved(folder, arch, device)
    texts = {
        "train": [book.train for book in books],
        "held_out": [book.held_out for book in books],
        "probe": [book.train[-len(book.held_out) :] for book in books],  # trained on, and near to what was not
    }
    streams = {name: encode(tokenizer, text) for name, text in texts.items()}
    tokens = {name: int((stream != BOS_ID).sum()) for name, stream in streams.items()}
    sizes = {name: sum(len(text.encode()) for text in group) for name, group in texts.items()}
    loss, train_loss = (
        mean_loss(model, streams["held_out"], arch.context),
        mean_loss(model, streams["probe"], arch.context),
    )
    unigram = unigram_loss(streams["train"], streams["held_out"], arch.vocab)
    opt = arch.model_type == "opt"
    prompt, seen = "Once upon a time", effort.steps * BATCH * arch.context
    card = CARD.format(
        **asdict(arch),
        ffn_kind="an ungated FFN" if opt else "a gated FFN",
        attention_kind="multi-head" if arch.heads == arch.kv_heads else "grouped-query",
        positions="learned positions" if opt else f"RoPE θ = {arch.rope_theta:.0f}",
        sparsity=sparsity_text(model, streams["held_out"]) if arch.hidden_act == "relu" else "",
        ffn=f"{arch.experts} experts of {arch.neurons} neurons, {arch.active} of them for a token"
        if arch.experts
        else f"{arch.neurons} neurons",
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        held_out=HELD_OUT,
        held_out_tokens=tokens["held_out"],
        held_out_bytes=sizes["held_out"],
        loss=loss,
        bits=loss * tokens["held_out"] / math.log(2) / sizes["held_out"],
        unigram=unigram,
        unigram_bits=unigram * tokens["held_out"] / math.log(2) / sizes["held_out"],
        train_loss=train_loss,
        train_bits=train_loss * tokens["probe"] / math.log(2) / sizes["probe"],
        prompt=prompt,
        sample="\n".join(f"> {line}".rstrip() for line in sample(model, tokenizer, prompt, 120).split("\n")),
        command=" ".join(["python tools/train_reference.py", *sys.argv[1:]]),
        steps=effort.steps,
        batch=BATCH,
        seen=seen / 1e6,
        epochs=seen / len(streams["train"]),
        rate=PEAK_RATE,
        warmup=WARMUP,
        final=FINAL_SHARE,
        decay=WEIGHT_DECAY,
        seed=SEED,
        precision="bfloat16 autocast" if has_bfloat16(device) else "float32",
        torch=torch.__version__,
        minutes=effort.wall_seconds / 60,
        cpu_minutes=effort.cpu_seconds / 60,
        fastest=effort.fastest,
        best_minutes=seen / max(effort.fastest, 1) / 60,
        device=f"{torch.get_num_threads()} cores" if device.type == "cpu" else torch.cuda.get_device_name(),
        train_tokens=tokens["train"],
        train_bytes=sizes["train"],
        count=len(books),
        digest=hashlib.sha256("".join(book.train + book.held_out for book in books).encode()).hexdigest(),
        books="\n".join(
            f"| {book.name} | {book.title} | {len((book.train + book.held_out).encode())} |" for book in books
        ),
    )
    write(folder, "README.md", card.encode())
    print(f"{folder}: loss {loss:.4f} held out, {train_loss:.4f} in training, {unigram:.4f} unigram", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a reference model from plain text.")
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--books", type=Path, default=Path("../shared/data/books"), help="a folder of .txt files")
    parser.add_argument("--out", type=Path, help="the folder to write (default: penstock/assets/NAME)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; another number may round otherwise")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which needs a C++ compiler")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    arch, device = ARCHITECTURES[options.arch], torch.device(options.device)
    folder: Path = options.out or Path("penstock/assets") / arch.name
    torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what CUDA asks of who wants the same sums twice
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it; 4 % of a step
    torch.manual_seed(SEED)

    books = read_books(options.books)
    tokenizer = train_tokenizer(books, arch.vocab)
    stream = encode(tokenizer, [book.train for book in books])
    print(f"{len(stream)} training tokens", file=sys.stderr, flush=True)
    model = make_model(arch).to(device)
    effort = train(model, stream, options.steps, arch.context, device, not options.no_compile)
    save_model(folder, arch, tokenizer, model)
    publish(folder, arch, books, effort, device)


if __name__ == "__main__":
    main()
