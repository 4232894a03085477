"""`dotllm trace`: every op of a run, or the first op in which two backends part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from dotllm.cli.console import Console, set_log_level
from dotllm.cli.locate import model_path
from dotllm.cli.options import GenerateOptions, Json, ModelArgument, ModelFlag, ModelOptions, OutputOptions, flag
from dotllm.cli.prompt import DEMO_PROMPT, run_prompt, token_limit
from dotllm.cli.run import answer_events
from dotllm.cli.session import open_session
from dotllm.errors import DotLLMError

if TYPE_CHECKING:
    from pathlib import Path

    from dotllm.ops.trace import Call, Comparison, Difference, Recorder

__all__ = ["trace"]

_KEPT_BYTES = 512 << 20  # copies of results that a comparison holds


def trace(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    prompt: Annotated[str, flag("-p", "--prompt", metavar="TEXT", help="The prompt.")] = DEMO_PROMPT,
    n_predict: Annotated[int, flag("-n", "--n-predict", metavar="N", help="Tokens to generate.")] = 1,
    compare: Annotated[
        tuple[str, str] | None,
        flag("--compare", metavar="A B", help="Run on two backends; show where their results part."),
    ] = None,
    tolerance: Annotated[
        float,
        flag(
            "--tolerance",
            metavar="X",
            help="Greatest max|a-b| / max|a| that still counts as equal; rounded activations reach a few percent.",
        ),
    ] = 0.1,
    as_json: Json = False,
    *,
    how: ModelOptions,
    generate: GenerateOptions,
    output: OutputOptions,
) -> None:
    """Show each op of a run: tensors, shapes, milliseconds, and the numbers that it wrote."""
    from dotllm.ops.trace import Comparison, Recorder

    console = Console(quiet=output.quiet)
    set_log_level(verbose=output.verbose, quiet=output.quiet)
    path = model_path(model, model_flag)
    recorder = Recorder(_KEPT_BYTES if compare else 0)
    _record(path, how, generate, prompt, n_predict, compare[0] if compare else how.backend, recorder, console)
    if compare is None:
        _show_calls(console, recorder.calls, as_json=as_json)
        return
    comparison = Comparison(recorder.calls)
    _record(path, how, generate, prompt, n_predict, compare[1], comparison, console)
    apart = comparison.first_apart(tolerance)
    _show_differences(console, comparison.differences, apart, compare, tolerance, as_json=as_json)
    if apart is not None:
        raise DotLLMError(f"{compare[0]} and {compare[1]} part at {_difference_text(apart)}")


def _record(
    path: Path,
    how: ModelOptions,
    generate: GenerateOptions,
    prompt: str,
    n_predict: int,
    backend: str,
    watch: Recorder | Comparison,
    console: Console,
) -> None:
    """Run the prompt greedily on a backend, with every op after loading reported to `watch`."""
    from dotllm.engine.request import Request
    from dotllm.ops.select import select_ops
    from dotllm.ops.trace import traced

    ops = traced(select_ops(backend, how.threads), watch)
    with open_session(path, how, console, ops=ops) as session:
        tokens = run_prompt(session, prompt, generate).tokens
        request = Request(
            prompt=tokens,
            max_tokens=token_limit(n_predict),
            stop=tuple(generate.reverse_prompt),
            ignore_eos=generate.ignore_eos,
        )
        watch.clear()
        for _ in answer_events(session, request):
            pass


def _show_calls(console: Console, calls: Sequence[Call], *, as_json: bool) -> None:
    from dotllm.ops.trace import HOUSEKEEPING

    shown = [call for call in calls if call.op not in HOUSEKEEPING]
    if as_json:
        console.write(json.dumps({"ops": [_call_object(call) for call in shown]}) + "\n")
        return
    for number, call in enumerate(shown):
        name = f"{number:>5} {call.op:<14} {call.milliseconds:>9.3f} ms"
        outputs = call.outputs
        if not outputs:
            console.write(f"{name}  {' '.join(call.tensors)}\n")
        for j, out in enumerate(outputs):
            shape = "x".join(map(str, out.shape))
            tensors = " ".join(call.tensors) if j == 0 else ""
            numbers = f"[{out.least:>11.4g} {out.greatest:>11.4g}] mean {out.mean:>11.4g}"
            console.write(f"{name if j == 0 else '':<33}  {out.name:<8} {shape:<14} {numbers}  {tensors}\n")
    _show_totals(console, shown)


def _show_totals(console: Console, calls: Sequence[Call]) -> None:
    """Milliseconds by op, largest first."""
    spent: Counter[str] = Counter()
    count = Counter(call.op for call in calls)
    for call in calls:
        spent[call.op] += call.milliseconds  # type: ignore[assignment]
    total = sum(spent.values()) or 1
    console.write("\n")
    for op, milliseconds in spent.most_common():
        share = 100 * milliseconds / total
        console.write(f"{op:<16} {count[op]:>6} calls {milliseconds:>10.2f} ms {share:>6.1f} %\n")


def _call_object(call: Call) -> dict[str, Any]:
    outputs = [
        {
            "name": out.name,
            "shape": list(out.shape),
            "min": _finite(out.least),
            "max": _finite(out.greatest),
            "mean": _finite(out.mean),
        }
        for out in call.outputs
    ]
    return {"op": call.op, "tensors": list(call.tensors), "ms": round(call.milliseconds, 4), "outputs": outputs}


def _finite(value: float) -> float | str:
    """JSON has no infinity and no NaN; those become their names."""
    return value if value - value == 0 else str(value)


def _show_differences(
    console: Console,
    differences: Sequence[Difference],
    apart: Difference | None,
    backends: tuple[str, str],
    tolerance: float,
    *,
    as_json: bool,
) -> None:
    if as_json:
        rows = [_difference_object(d) for d in differences]
        first = None if apart is None else _difference_object(apart)
        report = {"backends": list(backends), "tolerance": tolerance, "first_apart": first, "differences": rows}
        console.write(json.dumps(report) + "\n")
        return
    console.write(f"   op {'':<16} output   max|a-b|    relative   (a = {backends[0]}, b = {backends[1]})\n")
    for d in differences:
        mark = "  <- part here" if d is apart else ""
        numbers = d.reason or f"{d.absolute:>10.3g}  {d.relative:>10.3g}"
        console.write(f"{d.index:>5} {d.op:<16} {d.output:<8} {numbers}  {' '.join(d.tensors)}{mark}\n")
    if apart is None:
        worst = max((d.relative for d in differences), default=0.0)
        console.write(f"\nno op parts by more than {tolerance:g}; the largest relative difference is {worst:.3g}\n")


def _difference_text(d: Difference) -> str:
    where = f"op {d.index}, {d.op} {' '.join(d.tensors)}".rstrip()
    return f"{where}: {d.reason or f'{d.output} differs by {d.absolute:.3g} ({d.relative:.3g} of its largest value)'}"


def _difference_object(d: Difference) -> dict[str, Any]:
    return {
        "index": d.index,
        "op": d.op,
        "tensors": list(d.tensors),
        "output": d.output,
        "max_difference": _finite(d.absolute),
        "relative": _finite(d.relative),
        "reason": d.reason or None,
    }
