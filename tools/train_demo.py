"""Make the bundled story model again, from a folder of books: corpus, tokenizer, training, export, check.

    python -m pip install torch gguf tokenizers xllamacpp
    python tools/train_demo.py BOOKS_DIR --out story --minutes 65

writes story-f32.gguf and story-q8_0.gguf, and, where xllamacpp is installed, story-q4_k_m.gguf (gguf-py cannot write
K-quants). story.pt (parameters and tokenizer) and story.log stay beside them; `--from story.pt` exports again without
training. With xllamacpp, llama.cpp's logits of story-f32.gguf must agree with PyTorch's to 1e-3.
`tools/story/books.tsv` lists the books of the bundled model. PyTorch is needed for this tool alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from story.corpus import read_books
from story.export import FILE_TYPES, write
from story.model import Config, StoryModel
from story.tokenizer import END, encode
from story.tokenizer import train as train_tokenizer
from story.train import Plan, Streams, train

AGREEMENT = 1e-3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and export the bundled story model.")
    parser.add_argument("books", type=Path, nargs="?", help="folder of *.txt; longer books in its folder novels/")
    parser.add_argument("--from", dest="checkpoint", type=Path, help="export this checkpoint instead of training")
    parser.add_argument("--out", default="story", help="prefix of the files (default: story)")
    parser.add_argument("--minutes", type=float, default=65, help="training time (default: 65)")
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps instead")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16: faster only on a CPU that has it")
    parser.add_argument("--eager", action="store_true", help="no torch.compile (which needs a C++ compiler)")
    options = parser.parse_args(arguments)
    if (options.books is None) == (options.checkpoint is None):
        parser.error("give either BOOKS_DIR or --from CHECKPOINT")
    if options.books is not None and not options.books.is_dir():
        parser.error(f"{options.books} is not a folder")
    return options


def train_from_books(options: argparse.Namespace, checkpoint: Path) -> None:
    """Corpus, tokenizer and training; the result is `checkpoint`."""
    corpus = read_books(options.books, options.seed)
    print(f"{len(corpus.tales)} tales, {len(corpus.novels)} chapters of novels, {len(corpus.valid)} held out")
    tokenizer = train_tokenizer(corpus.tales + corpus.novels)
    streams = {"tales": encode(tokenizer, corpus.tales), "novels": encode(tokenizer, corpus.novels)}
    print(f"{sum(map(len, streams.values()))} tokens")
    torch.manual_seed(options.seed)
    model = StoryModel(Config())
    print(f"{sum(p.numel() for p in model.parameters())} parameters")

    def save() -> None:
        part = checkpoint.with_suffix(".part")
        torch.save(
            {"model": model.state_dict(), "config": dataclasses.asdict(model.c), "tokenizer": tokenizer.to_str()}, part
        )
        os.replace(part, checkpoint)

    product = torch.bfloat16 if options.bf16 else torch.float32
    plan = Plan(options.minutes, options.steps, not options.eager, product)
    source = Streams(streams, encode(tokenizer, corpus.valid), tokenizer.encode(END).ids[0], options.seed)
    train(model, source, plan, checkpoint.with_suffix(".log"), save)


def export(checkpoint: Path, prefix: str) -> tuple[StoryModel, Path]:
    """All files of a checkpoint; returns the model and its f32 file."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = StoryModel(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    model.eval()
    quantise = {"f32": quants.quantize, "q8_0": quants.quantize}
    if importlib.util.find_spec("xllamacpp"):
        from peer_llamacpp import quantize_rows

        quantise["q4_k_m"] = quantize_rows
    for file_type in FILE_TYPES:
        path = Path(f"{prefix}-{file_type}.gguf")
        if file_type in quantise:
            write(path, model, saved["tokenizer"], file_type, quantise[file_type])
            print(f"wrote {path} ({path.stat().st_size} bytes)")
        else:
            print(f"no {path}: it needs xllamacpp")
    return model, Path(f"{prefix}-f32.gguf")


@torch.no_grad()
def difference(model: StoryModel, path: Path) -> tuple[float, float]:
    """Largest difference between llama.cpp's and PyTorch's logits, of the trunk and of the MTP head, on 128 tokens."""
    from peer_llamacpp import Peer

    ids = np.random.default_rng(0).integers(0, model.c.vocab - 3, 128)
    ours, ours_mtp = (x[0].numpy() for x in model(torch.from_numpy(ids)[None]))
    with Peer(path) as peer:
        theirs, theirs_mtp = peer.logits(ids.tolist(), mtp=True)
    return float(abs(ours - theirs).max()), float(abs(ours_mtp - theirs_mtp).max())


def main(arguments: list[str] | None = None) -> int:
    """The whole pipeline; 1 if llama.cpp and PyTorch disagree."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    checkpoint = options.checkpoint or Path(f"{options.out}.pt")
    if options.books is not None:
        train_from_books(options, checkpoint)
    model, path = export(checkpoint, options.out)
    if importlib.util.find_spec("xllamacpp"):
        trunk, mtp = difference(model, path)
        print(f"llama.cpp and PyTorch: logits within {trunk:.1e}, MTP logits within {mtp:.1e}")
        return 0 if max(trunk, mtp) <= AGREEMENT else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
