"""Compare dotllm with llama.cpp on the same file: token ids, logits, greedy continuations, perplexity; or speed.

    python -m pip install -e '.[bench]'
    python tools/compare_peer.py MODEL [--text FILE] [--prompts N] [--windows N] [--mtp] [--json]
    python tools/compare_peer.py --speed MODEL... [--engines A,B] [--native LLAMA_BENCH] [--rounds N]

Greedy continuations are compared without sampling twice: where our most likely token is llama.cpp's at each position of
its own continuation, our continuation is the same. Both sides compute in float32 with a float32 cache.

On quantised files both round activations to 8 bits, and a sum that differs in its last bit now and then rounds to the
other side; so the same comparison of llama.cpp with itself, as it runs by default, is the yardstick of what to expect.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import peer_speed
from numpy.typing import NDArray
from peer_llamacpp import Peer
from peer_worker import ENGINES

Logits = NDArray[np.float32]

CONTINUED = 16
CONTEXT = 1024
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:
once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and
what is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid),
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by her."""
SENTENCES = (
    "The cat sat on the mat and looked at the moon.",
    "There are seven days in a week and twelve months in a year.",
    "for (int i = 0; i < 10; i++) { total += values[i]; }",
    "Red, green and blue are the colours of a screen.",
    "Mr Smith, 12 High Street, London, was born on 4 May 1950.",
    "<p class='title'>Chapter one: in which we meet the hero</p>",
    "1, 2, 4, 8, 16, 32, 64, 128, 256, 512",
    "Water freezes at zero degrees and boils at one hundred.",
    "Der Hund schläft unter dem Tisch, und die Katze sitzt am Fenster.",
    "She sells sea shells by the sea shore every summer morning.",
)
KNOWN = tuple(f"{line}\n{line}\n{line}\n{line[:12]}" for line in SENTENCES)
"""Prompts that go on in one way: a line again and again."""

OPEN = (
    "Once upon a time",
    "There was once a king who had three daughters, and",
    "The old woman opened the door and said:",
    "Dear Sir or Madam,\n\nI am writing to",
    "In the year 1492,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "My favourite colour is",
    "The best way to learn",
    "Es war einmal ein",
)
"""Prompts with many good continuations: near-ties, at which roundings decide."""

TRICKY = (
    "Hello, world!",
    "  leading and trailing  ",
    "don't WON'T it's 1234567 3.14",
    "tabs\tand\r\nlines\n\n\nend",
    "naïve café über straße Ærø",
    "日本語 中文 한국어 हिन्दी العربية",
    "👩‍👩‍👧 🇫🇷 e\u0301",
    "if (x != 0) { return a->b[i]; }  // ok",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tables of logits (rows, vocabulary) are apart; `scale` is the standard deviation of llama.cpp's."""

    rows: int
    largest: float
    rms: float
    scale: float
    same_argmax: int

    @classmethod
    def of(cls, ours: Logits, theirs: Logits) -> Difference:
        apart = ours.astype(np.float64) - theirs
        return cls(
            rows=len(theirs),
            largest=float(abs(apart).max()),
            rms=float(np.sqrt((apart**2).mean())),
            scale=float(theirs.std()),
            same_argmax=int((ours.argmax(1) == theirs.argmax(1)).sum()),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was compared; `mtp` only if asked for."""

    model: str
    tokenized_alike: int
    texts: int
    logits: Difference
    mtp: Difference | None
    known: tuple[int, int]
    open: tuple[int, int]
    prompts: int
    perplexity_ours: float
    perplexity_theirs: float
    perplexity_tokens: int


def dotllm(*arguments: str) -> str:
    """Standard output of a `dotllm` command."""
    done = subprocess.run([sys.executable, "-m", "dotllm", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"dotllm {arguments[0]} fails: {done.stderr.strip()}")
    return done.stdout


def our_logits(model: Path, tokens: Sequence[int], *options: str) -> Logits:
    """Logits (n, vocabulary) after each token, by `dotllm logits`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        dotllm("logits", str(model), "--tokens", ",".join(map(str, tokens)), "--out", str(out), *options)
        found: Logits = np.load(out)
    return found


def our_tokens(model: Path, text: str) -> list[int]:
    """Token ids, by `dotllm tokenize`."""
    return [token["id"] for token in json.loads(dotllm("tokenize", str(model), text, "--json"))["tokens"]]


def surprise(logits: Logits, tokens: Sequence[int]) -> float:
    """Sum of -log p(token i + 1) over the rows of one window."""
    x = logits[:-1].astype(np.float64)
    top = x.max(1)
    norm = top + np.log(np.exp(x - top[:, None]).sum(1))
    return float((norm - x[np.arange(len(x)), tokens[1:]]).sum())


def perplexity(
    model: Path, peer: Peer, windows: Sequence[Sequence[int]], options: Sequence[str]
) -> tuple[float, float]:
    """Ours and theirs, over windows that each begin without history."""
    count = sum(len(w) - 1 for w in windows)
    ours = sum(surprise(our_logits(model, w, *options), w) for w in windows)
    theirs = sum(surprise(peer.logits(w), w) for w in windows)
    return float(np.exp(ours / count)), float(np.exp(theirs / count))


def continued_alike(options: argparse.Namespace, prompts: Sequence[str], passed: Sequence[str]) -> tuple[int, int]:
    """How many greedy continuations are llama.cpp's for CONTINUED tokens: ours, and its own with default settings."""
    with Peer(options.model, CONTEXT) as peer:
        tokens = [peer.tokenize(prompt, add_special=True) for prompt in prompts]
        theirs = [peer.greedy(t, CONTINUED) for t in tokens]
    with Peer(options.model, CONTEXT, defaults=True) as peer:
        again = sum(peer.greedy(t, CONTINUED) == expected for t, expected in zip(tokens, theirs, strict=True))
    ours = 0
    for t, expected in zip(tokens, theirs, strict=True):
        logits = our_logits(options.model, [*t, *expected[:-1]], *passed)
        ours += bool((logits[len(t) - 1 :].argmax(1) == expected).all())
    return ours, again


def compare(options: argparse.Namespace) -> Report:
    """Run every comparison; llama.cpp's tokens are fed to both sides."""
    text = options.text.read_text("utf-8") if options.text else TEXT
    passed = [
        f"--{name}={value}" for name, value in (("backend", options.backend), ("threads", options.threads)) if value
    ]
    with Peer(options.model, CONTEXT) as peer:
        tokens = peer.tokenize(text, add_special=True)
        texts = [*KNOWN, *OPEN, *TRICKY, text[:2000]]
        alike = sum(our_tokens(options.model, t) == peer.tokenize(t, add_special=True) for t in texts)
        first = tokens[: options.window]
        mtp = None
        if options.mtp:
            theirs, theirs_mtp = peer.logits(first, mtp=True)
            mtp = Difference.of(our_logits(options.model, first, "--mtp", *passed), theirs_mtp)
        else:
            theirs = peer.logits(first)
        windows = [tokens[i : i + options.window] for i in range(0, len(tokens), options.window)]
        windows = [w for w in windows if len(w) > 1][: options.windows]
        ours_ppl, theirs_ppl = perplexity(options.model, peer, windows, passed)
        logits = Difference.of(our_logits(options.model, first, *passed), theirs)
    return Report(
        model=options.model.name,
        tokenized_alike=alike,
        texts=len(texts),
        logits=logits,
        mtp=mtp,
        known=continued_alike(options, KNOWN[: options.prompts], passed),
        open=continued_alike(options, OPEN[: options.prompts], passed),
        prompts=options.prompts,
        perplexity_ours=ours_ppl,
        perplexity_theirs=theirs_ppl,
        perplexity_tokens=sum(len(w) - 1 for w in windows),
    )


def show(report: Report) -> None:
    """The report for people."""
    print(f"{report.model}: dotllm and llama.cpp")
    print(f"  token ids       {report.tokenized_alike} of {report.texts} texts alike")
    for name, found in (("logits", report.logits), ("MTP logits", report.mtp)):
        if found:
            print(
                f"  {name:<15} differ by {found.largest:.2e} at most, {found.rms:.2e} rms (spread {found.scale:.2f}); "
                f"same argmax in {found.same_argmax} of {found.rows} rows"
            )
    for name, (ours, again) in (("known", report.known), ("open", report.open)):
        print(
            f"  greedy, {name:<7} {ours} of {report.prompts} prompts alike for {CONTINUED} tokens "
            f"(llama.cpp with itself: {again})"
        )
    print(
        f"  perplexity      {report.perplexity_ours:.4f} ours, {report.perplexity_theirs:.4f} theirs, "
        f"over {report.perplexity_tokens} tokens"
    )


def compare_speed(options: argparse.Namespace) -> list[peer_speed.Compared]:
    """Every file, with all engines that are there and can load it."""
    from dotllm.kernels_cpu.threads import default_threads

    native = peer_speed.native_bench(options.native)
    executables = {"native": native or ""}
    engines = {name: executables.get(name, "") for name in options.engines if name != "native" or native}
    tasks = [peer_speed.Task("prompt", options.prompt), peer_speed.Task("answer", options.answer, options.depth)]
    tasks = [task for task in tasks if task.tokens]
    threads = int(options.threads or default_threads())
    return [peer_speed.compare_file(model, tasks, engines, options.rounds, threads, _tell) for model in options.speed]


def _tell(text: str) -> None:
    """What is being done now, on the line where the last such text stood."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare dotllm with llama.cpp on the same GGUF file.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, help="a UTF-8 text (default: the beginning of Alice in Wonderland)")
    parser.add_argument("--prompts", type=int, default=len(KNOWN), help="greedy prompts of each kind (default: 10)")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text for perplexity (default: 4)")
    parser.add_argument("--window", type=int, default=256, help="tokens a window (default: 256)")
    parser.add_argument("--mtp", action="store_true", help="compare the logits of the MTP head too")
    parser.add_argument("--backend", help="passed on to dotllm logits")
    parser.add_argument("--threads", help="passed on to dotllm logits")
    parser.add_argument("--json", action="store_true")
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--speed", type=Path, nargs="+", metavar="MODEL", help="measure these files in place of comparing"
    )
    speed.add_argument("--engines", type=_engines, default=list(ENGINES), metavar="A,B", help=", ".join(ENGINES))
    speed.add_argument("--native", metavar="LLAMA_BENCH", help="a llama-bench (default: the one on the PATH, if any)")
    speed.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that warms up (default: 5)")
    speed.add_argument("--prompt", type=int, default=512, help="tokens of a prompt; 0 = none (default: 512)")
    speed.add_argument("--answer", type=int, default=64, help="tokens of an answer; 0 = none (default: 64)")
    speed.add_argument("--depth", type=int, default=16, help="tokens before the answer (default: 16)")
    return parser


def _engines(text: str) -> list[str]:
    names = text.split(",")
    if not names or set(names) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(ENGINES)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    """Compare and print; 0 whatever the figures are: they are to be read, not to be passed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.speed is None):
        parser.error("give one MODEL, or --speed MODEL...")
    if not 2 <= options.window <= CONTEXT:
        parser.error(f"--window takes 2 to {CONTEXT}")
    if options.windows < 1 or not 0 <= options.prompts <= len(KNOWN):
        parser.error(f"--windows takes 1 or more, --prompts 0 to {len(KNOWN)}")
    if min(options.rounds, options.depth, options.prompt + options.answer) < 1 or options.prompt * options.answer < 0:
        parser.error("--rounds and --depth take 1 or more, --prompt and --answer 0 or more and not both 0")
    if options.speed:
        compared = compare_speed(options)
        print(
            json.dumps(list(map(peer_speed.report, compared)), indent=1)
            if options.json
            else "\n\n".join(map(peer_speed.show, compared))
        )
        return 0
    report = compare(options)
    print(json.dumps(asdict(report), indent=1)) if options.json else show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
