"""What `run` and `chat` say about a model and a reply: header, statistics, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dotllm.cli.console import bytes_text, rate_text

if TYPE_CHECKING:
    from dotllm.cli.session import Session
    from dotllm.engine.request import Event
    from dotllm.engine.stats import RequestStats
    from dotllm.sampling.params import SamplingParams

__all__ = ["header_lines", "json_report", "sampling_text", "statistics_lines", "turn_line"]


def header_lines(session: Session, sampling: SamplingParams, template: str) -> list[str]:
    """What was loaded, and what will be done with it; `template` says which chat template is applied, or why none."""
    config = session.config
    attention = next((layer for layer in config.layers if layer.kind == "attention"), None)
    heads = f"/{attention.heads}H" if attention is not None else ""
    threads = f", {session.threads} thread{'s' if session.threads != 1 else ''}" if session.threads else ""
    parts = [
        "dotllm",
        f"{config.architecture} {len(config.layers)}L{heads}",
        config.file_type,
        session.backend + threads,
        sampling_text(sampling),
        f"context {session.context} of the model's {config.context_length}",
    ]
    return [" | ".join(parts), f"model: {config.name}; template: {template}", f"MTP: {mtp_text(session)}"]


def mtp_text(session: Session) -> str:
    """Whether the file has an MTP head. This version does not draft with it."""
    if session.config.mtp is None:
        return session.config.mtp_note
    return "head present and loaded; this version does not draft with it yet, so replies are decoded token by token"


def sampling_text(sampling: SamplingParams) -> str:
    """The parts of the sampler chain that are on."""
    parts = []
    if sampling.greedy:
        parts.append("greedy")
    else:
        parts.append(f"temp={sampling.temperature:g}")
        parts += [f"top-k={sampling.top_k}"] if sampling.top_k else []
        parts += [f"top-p={sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"min-p={sampling.min_p:g}"] if sampling.min_p else []
        parts.append(f"seed={sampling.seed}")
    parts += [f"repeat={sampling.repeat_penalty:g}"] if sampling.repeat_penalty != 1 else []
    parts += [f"presence={sampling.presence_penalty:g}"] if sampling.presence_penalty else []
    parts += [f"frequency={sampling.frequency_penalty:g}"] if sampling.frequency_penalty else []
    parts += [f"bias on {len(sampling.logit_bias)} tokens"] if sampling.logit_bias else []
    return ", ".join(parts)


def statistics_lines(session: Session, last: Event) -> list[str]:
    """The panel after a run."""
    stats = last.stats
    if stats is None:
        return []
    memory = memory_bytes(session)

    def row(name: str, milliseconds: float, tokens: int | None = None) -> str:
        rate = "" if tokens is None else f"{tokens:>8} tokens {rate_text(tokens, milliseconds):>10} tok/s"
        return f"  {name:<9}{milliseconds:>10.1f} ms{rate}"

    state = memory["recurrent_state_bytes"]
    recurrent = f", recurrent state {bytes_text(state)}" if state else ""
    return [
        row("prefill", stats.prefill_ms, stats.prefill_tokens),
        row("decode", stats.decode_ms, stats.decode_tokens),
        row("sampling", stats.sampling_ms),
        row("total", stats.total_ms),
        row("load", session.load_ms),
        f"  memory   weights {bytes_text(memory['weights_bytes'])} (as in the file), "
        f"KV cache {bytes_text(memory['kv_cache_bytes'])} ({session.cache_type}){recurrent}",
        f"  {reason_text(last)}: {stats.prompt_tokens} prompt tokens, {stats.generated_tokens} generated",
    ]


def reason_text(last: Event) -> str:
    """Why a reply ended."""
    if last.finish_reason == "stop" and last.stop is not None:
        return f"stop (at {last.stop!r})"
    return str(last.finish_reason)


def turn_line(stats: RequestStats) -> str:
    """The line below a chat reply."""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    return (
        f"[{stats.prompt_tokens} prompt tokens{cached}, {stats.generated_tokens} generated, "
        f"{stats.first_token_ms:.0f} ms to the first, "
        f"prefill {rate_text(stats.prefill_tokens, stats.prefill_ms)} tok/s, "
        f"decode {rate_text(stats.decode_tokens, stats.decode_ms)} tok/s]"
    )


def memory_bytes(session: Session) -> dict[str, int]:
    """Bytes by purpose; weights count with their size in the file, of which the CPU backend's copy is within 3 %."""
    state = session.engine.state.bytes
    parts = {
        "weights_bytes": session.file.size,
        "kv_cache_bytes": state.kv + state.mtp,
        "recurrent_state_bytes": state.recurrent + state.log + state.pending,
    }
    return {**parts, "total_bytes": sum(parts.values())}


def json_report(session: Session, prompt: str, events: Sequence[Event]) -> dict[str, Any]:
    """Everything about a run as one object."""
    last = events[-1]
    stats = last.stats
    if stats is None:
        raise ValueError("the last event of a request has its statistics")
    tokens = [event for event in events if event.token is not None]
    report: dict[str, Any] = {
        "text": "".join(event.text for event in events),
        "prompt": prompt,
        "model": session.config.name,
        "model_path": str(session.path),
        "architecture": session.config.architecture,
        "finish_reason": last.finish_reason,
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generated_tokens,
            "cached_tokens": stats.cached_tokens,
        },
        "timings": {
            "load_ms": round(session.load_ms, 3),
            "prefill_ms": round(stats.prefill_ms, 3),
            "decode_ms": round(stats.decode_ms, 3),
            "sampling_ms": round(stats.sampling_ms, 3),
            "total_ms": round(stats.total_ms, 3),
            "prefill_tok_s": round(stats.prefill_rate, 2),
            "decode_tok_s": round(stats.decode_rate, 2),
            "generated_tokens": stats.generated_tokens,
            "speculative_draft_tokens": stats.drafted_tokens,
            "speculative_accepted_tokens": stats.accepted_tokens,
            "speculative_acceptance_rate": (
                stats.accepted_tokens / stats.drafted_tokens if stats.drafted_tokens else None
            ),
        },
        "memory": memory_bytes(session),
        "tokens": [event.token for event in tokens],
    }
    if any(event.logprob is not None for event in tokens):
        report["logprobs"] = [_logprob(session, event) for event in tokens]
    return report


def _logprob(session: Session, event: Event) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = session.tokenizer.token_bytes(token, special=True)
        finite = logprob if logprob > float("-inf") else None  # JSON has no infinity
        return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": finite}

    token, logprob = event.token or 0, event.logprob if event.logprob is not None else 0.0
    return {**one(token, logprob), "top_logprobs": [one(i, p) for i, p in event.top]}
