#!/usr/bin/env python3
"""Trains the small reference models that penstock ships, from plain text to a Hugging Face folder, in one command.

    python tools/train_reference.py --arch llama        # from the project's root; writes penstock/assets/tale-llama/

Needs torch, tokenizers and safetensors. The tokenizer is trained with the model, on the same text. Nothing depends on the
clock: steps, order and seeds are fixed, so the same machine and torch version give the same weights again. The folder's
README.md (the model card) is written last, from figures measured on the files just saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from reference_model import ARCHITECTURES, Architecture, Model
from safetensors.torch import load, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

HELD_OUT = 0.04  # of every book, its end: about 110 thousand tokens, which puts the standard error of the loss near 0.01
BOS, EOS = "<|bos|>", "<|eos|>"
NOT_SCORED = -100
SEED = 20

BATCH = 4  # windows: at 2 epochs of 3 million tokens, many small steps teach more than few large ones, at the same speed
PEAK_RATE = 3e-3
FINAL_SHARE = 0.05  # of the peak rate, at the last step
WARMUP = 200
WEIGHT_DECAY = 0.1
STEPS = 3000  # 6.1 million tokens, just under two epochs; see the card for the time


# ---------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Book:
    name: str
    title: str
    train: str
    held_out: str


GUTENBERG_START = re.compile(r"\A.*?\*\*\* ?START OF TH[^\n]*\*\*\*[^\n]*\n", re.DOTALL)
GUTENBERG_END = re.compile(r"\*\*\* ?END OF TH.*\Z", re.DOTALL)
PICTURE = re.compile(r"\[Illustration[^\]]*\]")
EMPHASIS = re.compile(r"(?<!\w)_([^_]{1,400})_(?!\w)")
TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "\ufeff": None})


def unwrap(paragraph: str) -> str:
    """One line of a paragraph that was broken at a right margin.

    Prose here is wrapped at 70 to 79 columns and verse runs to 44, so a paragraph is prose if no line but its last is under
    50 and none is indented. That takes 97 % of the lines of the prose books and none of the plays.
    """
    lines = paragraph.strip("\n").split("\n")
    wrapped = all(len(line) >= 50 for line in lines[:-1]) and not any(line[:1].isspace() for line in lines[1:])
    return " ".join(line.strip() for line in lines) if wrapped else "\n".join(line.rstrip() for line in lines)


def clean(raw: str) -> str:
    """The book itself: no Gutenberg header and footer, no marks of pictures and italics, typewriter quotes, prose unwrapped.

    Typographic quotes and dashes become ASCII, as half of the books already have them: one spelling of each word, not two.
    """
    text = raw.replace("\r\n", "\n").replace("\r", "\n")
    text = GUTENBERG_END.sub("", GUTENBERG_START.sub("", text))
    text = EMPHASIS.sub(r"\1", PICTURE.sub("", text)).translate(TYPOGRAPHY)
    return "\n\n".join(unwrap(paragraph) for paragraph in re.split(r"\n\s*?\n", text) if paragraph.strip()) + "\n"


def read_books(folder: Path) -> list[Book]:
    books = []
    for path in sorted(folder.glob("*.txt")):
        text = clean(path.read_bytes().decode("utf-8"))
        cut = text.find("\n\n", int(len(text) * (1 - HELD_OUT)))  # at the paragraph's end
        cut = len(text) if cut < 0 else cut + 2
        title = text.split("\n", 1)[0].strip().strip(":;,") if path.stem.startswith("pg") else path.stem
        books.append(Book(path.name, title, text[:cut], text[cut:]))
    if not books:
        raise SystemExit(f"no .txt files in {folder}: name the folder with --books")
    return books


# ----------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(books: list[Book], vocab: int) -> Tokenizer:
    """Byte-level BPE: any text has tokens, and decoding gives its bytes back. Only training text is seen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((book.train for book in books), trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[bos]
    )
    if tokenizer.get_vocab_size() != vocab:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} tokens, the architecture wants {vocab}: more text is needed")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """One stream [N] of documents, each between its bos and its eos."""
    eos: int = tokenizer.token_to_id(EOS)
    ids = [token for document in tokenizer.encode_batch(texts) for token in [*document.ids, eos]]
    return torch.tensor(ids, dtype=torch.int64)


def windows(stream: Tensor, starts: Tensor, length: int, bos: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, T]: every window begins with bos, as every prompt does, and bos itself is never a target."""
    targets = stream[starts[:, None] + torch.arange(length)]  # [B, T]
    inputs = F.pad(targets[:, :-1], (1, 0), value=bos)  # [B, T]
    return inputs, targets.masked_fill(targets == bos, NOT_SCORED)


# ------------------------------------------------------------------------------------------------------------ training


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats, summed over the scored positions."""
    logits = model(inputs).float()  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED, reduction="sum")


def batches(stream: Tensor, steps: int, length: int, bos: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Each epoch cuts the stream into windows at a new offset and shuffles them, so that no token is seen twice as often."""
    starts = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(starts) < BATCH:
            offset = int(torch.randint(length, (), generator=generator))
            epoch = torch.arange(offset, len(stream) - length + 1, length)
            starts = torch.cat([starts, epoch[torch.randperm(len(epoch), generator=generator)]])
        yield windows(stream, starts[:BATCH], length, bos)
        starts = starts[BATCH:]


def learning_rate(step: int, steps: int) -> float:
    """Linear to the peak, then a half cosine. Short trial runs warm up over a tenth of their steps."""
    warmup = min(WARMUP, max(1, steps // 10))
    if step < warmup:
        return PEAK_RATE * (step + 1) / warmup
    turn = (step - warmup) / max(1, steps - warmup)
    return PEAK_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * turn)) / 2)


def train(model: Model, stream: Tensor, steps: int, length: int, bos: int, device: torch.device, compiled: bool) -> float:
    """Trains in place; the seconds it took."""
    # 6.95 M parameters, batch 4 x 512, two Zen cores with AVX-512 BF16: 2050 tokens/s in float32, 2950 with bfloat16 autocast,
    # 3560 when compiled too (40 s of compilation, against minutes saved). Batches of 8 windows are no faster.
    forward: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    gains = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(SEED)
    smooth, begin = 0.0, time.perf_counter()
    warm = begin  # the end of the first step, which compiles: rates count from there
    for step, (inputs, targets) in enumerate(batches(stream, steps, length, bos, generator)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast(device.type, torch.bfloat16):
            loss = summed_loss(forward, inputs.to(device), targets.to(device)) / targets.numel()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = time.perf_counter()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step == 0:
            warm = now
        elif step % 20 == 0 or step + 1 == steps:
            rate, left = step / (now - warm), (steps - step - 1) * (now - warm) / step
            progress = f"step {step + 1}/{steps}  loss {smooth:.3f}  {rate * targets.numel():.0f} tokens/s  {left / 60:.1f} min left"
            print(progress, file=sys.stderr, flush=True)
    return time.perf_counter() - begin


# ---------------------------------------------------------------------------------------------------------- evaluation


@torch.inference_mode()
def mean_loss(model: Model, stream: Tensor, length: int, bos: int) -> float:
    """Nats a token in float32: windows that do not overlap, every token but bos scored once, a window's first from bos alone."""
    padded = F.pad(stream, (0, -len(stream) % length), value=bos)  # bos is not scored
    device = next(model.parameters()).device
    total, scored = 0.0, 0
    for starts in torch.arange(0, len(padded), length).split(8):
        inputs, targets = windows(padded, starts, length, bos)
        total += summed_loss(model, inputs.to(device), targets.to(device)).item()
        scored += int((targets != NOT_SCORED).sum())
    return total / scored


def unigram_loss(train_stream: Tensor, stream: Tensor, vocab: int, bos: int) -> float:
    """Nats a token of a model that knows only how often each token occurs in the training text, plus one."""
    counts = torch.bincount(train_stream[train_stream != bos], minlength=vocab).double() + 1  # [V]
    return float(-(counts / counts.sum()).log()[stream[stream != bos]].mean())


@torch.inference_mode()
def sample(model: Model, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """A continuation at temperature 0.7 among the 40 likeliest tokens, without a cache: it is for the card, not for speed."""
    generator = torch.Generator().manual_seed(SEED)
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        logits = model(torch.tensor([ids], device=next(model.parameters()).device))[0, -1].cpu()  # [V]
        values, candidates = logits.topk(40)
        ids.append(int(candidates[torch.multinomial((values / 0.7).softmax(0), 1, generator=generator)]))
    text: str = tokenizer.decode(ids)
    return text


# -------------------------------------------------------------------------------------------------------------- output


def write(folder: Path, name: str, content: bytes) -> None:
    """Aside, then renamed: an interrupted run leaves the old file or the new one, nothing between."""
    aside = folder / f".{name}.part"
    aside.write_bytes(content)
    os.replace(aside, folder / name)


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def save_model(folder: Path, arch: Architecture, tokenizer: Tokenizer, model: Model) -> None:
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    rounded = {name: weight.detach().cpu().bfloat16().contiguous() for name, weight in model.state_dict().items()}
    write(folder, "model.safetensors", save(rounded, metadata={"format": "pt"}))
    write(folder, "config.json", as_json(arch.hf_config(bos, eos)))
    write(folder, "generation_config.json", as_json({"bos_token_id": bos, "eos_token_id": eos}))
    write(folder, "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": arch.context,
        "clean_up_tokenization_spaces": False,
    }
    write(folder, "tokenizer_config.json", as_json(tokenizer_config))


def load_saved(folder: Path, arch: Architecture, device: torch.device) -> Model:
    """The model as a user gets it: the rounded weights of the file, computed with in float32."""
    model = Model(arch)
    model.load_state_dict({name: weight.float() for name, weight in load((folder / "model.safetensors").read_bytes()).items()})
    return model.to(device).eval()


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: penstock
---

# {name}

A small trained language model that ships with penstock, for its demo, tests and examples: {parameters:.2f} M parameters,
model_type `llama`, hidden_act `{hidden_act}` (gated FFN), grouped-query attention. It writes plausible-looking old English
prose and knows nothing; it is a model to run an engine with, not to ask questions of.

| | |
|---|---|
| layers × width | {layers} × {width} |
| attention | {heads} query heads, {kv_heads} key-value heads of {head_width}, RoPE θ = {rope_theta:.0f} |
| FFN | {neurons} neurons |
| vocabulary | {vocab}, byte-level BPE trained on the same text; embedding and head tied |
| context | {context} tokens |
| weights | bfloat16, {megabytes:.1f} MB |

## How good it is

Losses of the rounded bfloat16 weights in this folder, computed in float32. The held-out text is the last {held_out:.0%} of
every book ({held_out_tokens} tokens, {held_out_bytes} bytes), seen by neither the model nor the tokenizer in training.
Windows of {context} tokens that do not overlap, each after a bos token; every token is scored once.

| | nats per token | bits per byte |
|---|---|---|
| {name}, held-out text | **{loss:.4f}** | {bits:.4f} |
| unigram model, held-out text | {unigram:.4f} | {unigram_bits:.4f} |
| {name}, training text: as much of every book, just before its held-out end | {train_loss:.4f} | {train_bits:.4f} |

The unigram model knows each token's frequency in the training text, with one added to every count.

A continuation of "{prompt}" (temperature 0.7, top-k 40):

> {sample}

## How it was made

    {command}

{steps} steps of {batch} windows of {context} tokens ({seen:.1f} million tokens, {epochs:.1f} epochs), AdamW, rate {rate:g} with
{warmup} steps of warm-up and a cosine down to {final:.0%} of it, weight decay {decay:g}, gradients clipped to norm 1, bfloat16
autocast, seed {seed}. Training took {minutes:.0f} minutes
({speed:.0f} tokens/s, compilation included) on {device}, torch {torch}. The same torch on the same machine gives the same
weights again; another machine rounds otherwise and ends near the same loss.

## Data and licence

{train_tokens} training tokens ({train_bytes} bytes) from the {count} books below, all in the public domain: Project Gutenberg
texts without their headers and footers, and tiny Shakespeare. Prose was unwrapped, and typographic quotes and dashes made
ASCII. The model is under the Apache License 2.0. SHA-256 of the cleaned text:
`{digest}`.

| file | title | bytes |
|---|---|---|
{books}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a reference model from plain text.")
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--books", type=Path, default=Path("../shared/data/books"), help="a folder of .txt files (UTF-8)")
    parser.add_argument("--out", type=Path, help="the folder to write (default: penstock/assets/NAME)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; another number may round otherwise")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (which needs a C++ compiler)")
    options = parser.parse_args()
    arch = ARCHITECTURES[options.arch]
    folder: Path = options.out or Path("penstock/assets") / arch.name
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor once more
    torch.manual_seed(SEED)

    books = read_books(options.books)
    held_out_texts = [book.held_out for book in books]
    probe_texts = [book.train[-len(book.held_out) :] for book in books]  # trained on, and next to what was not: a fair pair
    tokenizer = train_tokenizer(books, arch.vocab)
    bos: int = tokenizer.token_to_id(BOS)
    train_stream = encode(tokenizer, [book.train for book in books])
    held_out_stream = encode(tokenizer, held_out_texts)
    probe_stream = encode(tokenizer, probe_texts)
    print(f"{len(train_stream)} training tokens, {len(held_out_stream)} held out", file=sys.stderr, flush=True)

    model = Model(arch).to(device)
    seconds = train(model, train_stream, options.steps, arch.context, bos, device, not options.no_compile)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, arch, tokenizer, model)

    saved = load_saved(folder, arch, device)
    loss, train_loss = (mean_loss(saved, stream, arch.context, bos) for stream in (held_out_stream, probe_stream))
    unigram = unigram_loss(train_stream, held_out_stream, arch.vocab, bos)

    def bits_per_byte(nats: float, stream: Tensor, texts: list[str]) -> float:
        return nats * int((stream != bos).sum()) / math.log(2) / sum(len(text.encode()) for text in texts)

    seen = options.steps * BATCH * arch.context
    prompt = "Once upon a time"
    card = CARD.format(
        **{field: getattr(arch, field) for field in arch.__dataclass_fields__},
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        held_out=HELD_OUT,
        held_out_tokens=len(held_out_stream),
        held_out_bytes=sum(len(text.encode()) for text in held_out_texts),
        loss=loss,
        bits=bits_per_byte(loss, held_out_stream, held_out_texts),
        unigram=unigram,
        unigram_bits=bits_per_byte(unigram, held_out_stream, held_out_texts),
        train_loss=train_loss,
        train_bits=bits_per_byte(train_loss, probe_stream, probe_texts),
        prompt=prompt,
        sample=sample(saved, tokenizer, prompt, 120).replace("\n", "\n> "),
        command=" ".join(["python tools/train_reference.py", *sys.argv[1:]]),
        steps=options.steps,
        batch=BATCH,
        seen=seen / 1e6,
        epochs=seen / len(train_stream),
        rate=PEAK_RATE,
        warmup=WARMUP,
        final=FINAL_SHARE,
        decay=WEIGHT_DECAY,
        seed=SEED,
        minutes=seconds / 60,
        speed=seen / seconds,
        device=f"{options.threads} CPU cores" if device.type == "cpu" else torch.cuda.get_device_name(),
        torch=torch.__version__,
        train_tokens=len(train_stream),
        train_bytes=sum(len(book.train.encode()) for book in books),
        count=len(books),
        digest=hashlib.sha256("".join(book.train + book.held_out for book in books).encode()).hexdigest(),
        books="\n".join(f"| {book.name} | {book.title} | {len((book.train + book.held_out).encode())} |" for book in books),
    )
    write(folder, "README.md", card.encode())
    print(f"{folder}: held-out loss {loss:.4f}, unigram {unigram:.4f}, {seconds / 60:.1f} min", file=sys.stderr)


if __name__ == "__main__":
    main()
