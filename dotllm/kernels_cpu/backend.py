"""The CPU backend: every op of `dotllm.ops.protocol.Ops` as a checked call of a kernel.

Ops check what they are given, flatten it, and choose the number of threads by the amount of work; neither that choice
nor the number itself changes a bit of the result. Buffers are plain NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.reader import Tensor
from dotllm.kernels_cpu import activation, attention, conv, gated_delta, moe, norm, rope
from dotllm.kernels_cpu.checks import check_kv_rows, check_recurrent_rows, floats, ids, integers, require
from dotllm.kernels_cpu.decode import DECODERS
from dotllm.kernels_cpu.matmul import CpuWeight, arrays_of, every_row, gathered, load_weight, product
from dotllm.kernels_cpu.prepared import CpuPrepared, CpuTable
from dotllm.kernels_cpu.program import LEAST_WORK, Command
from dotllm.kernels_cpu.quantize import quantize_command
from dotllm.kernels_cpu.recorder import Recorder
from dotllm.kernels_cpu.rows import embed_kernel, gather_part
from dotllm.kernels_cpu.threads import choose_layer, set_threads
from dotllm.ops.protocol import PAGE, Activation, KvLayer, Rows
from dotllm.ops.rope import cos_sin_table

__all__ = ["CpuOps"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_NO_FLOATS: F32 = np.empty(0, np.float32)
_NO_HALVES: NDArray[np.uint16] = np.empty(0, np.uint16)
_DTYPES = {"f32": np.float32, "f16": np.uint16}

ATTENTION_ROWS = 8
"""Rows that share one pass over the cache: enough to hide its traffic, few enough to stay in the first cache."""


class CpuOps:
    """Ops in Numba kernels on `n_threads` threads (None: one per physical core)."""

    name = "cpu"

    def __init__(self, n_threads: int | None = None, least_work: int = LEAST_WORK) -> None:
        choose_layer()
        self.n_threads = set_threads(n_threads)
        self._recorder = Recorder(self.n_threads, least_work)
        self._scratch = self._recorder.scratch

    def recorded(
        self,
        owner: Any,
        key: Hashable,
        build: Callable[..., Any],
        inputs: Sequence[I32],
        buffers: Sequence[NDArray[Any]] = (),
    ) -> Any:
        return self._recorder.recorded(owner, key, build, inputs, buffers)

    def _run(self, kernel: Any, work: int, *arguments: Any) -> None:
        """One call of a kernel, in parts if there is enough work."""
        self._recorder.run(Command(kernel, arguments, self._recorder.parts(work)))

    def _ids(self, name: str, array: Any, limit: int, ndim: int = 1) -> I32:
        """An int32 array whose values lie in 0 .. limit - 1, now and in every pass."""
        checked = integers(name, array, ndim)
        self._recorder.check((name, id(array), limit), lambda: ids(name, checked, limit, ndim))
        return checked

    def _kv_rows(self, rows: Rows, count: int, window: int, pages: int) -> None:
        self._recorder.check(("kv", id(rows), count, window, pages), lambda: check_kv_rows(rows, count, window, pages))

    def _recurrent_rows(self, rows: Rows, count: int, planes: int) -> None:
        self._recorder.check(("gdn", id(rows), count, planes), lambda: check_recurrent_rows(rows, count, planes))

    # ---- loading and moving
    def load(self, tensor: Tensor, rows: NDArray[np.int64] | None = None) -> CpuWeight:
        matrices = tensor.shape[:-1] or (1,)
        raw = tensor.data.reshape(*matrices, tensor.row_bytes)
        return load_weight(tensor.type, raw if rows is None else raw[..., rows, :])

    def load_table(self, tensor: Tensor) -> CpuTable:
        if tensor.type.name in DECODERS:
            return CpuTable(tensor.shape, tensor.data.reshape(-1), embed_kernel(tensor.type.name))
        values = dequantize(tensor.data.reshape(tensor.rows, tensor.row_bytes), tensor.type)
        return CpuTable(tensor.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8), embed_kernel("F32"))

    def load_vector(self, tensor: Tensor) -> F32:
        values = dequantize(tensor.data.reshape(tensor.rows, tensor.row_bytes), tensor.type)
        return np.array(values, np.float32, order="C").reshape(tensor.shape)

    def empty(self, shape: tuple[int, ...]) -> F32:
        return np.empty(shape, np.float32)

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
        return np.zeros(shape, _DTYPES[dtype])

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def get(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def gather(self, x: F32, index: I32, out: F32) -> None:
        require(
            out.shape == (len(index), *x.shape[1:]), "gather: {} rows of {} into {}", len(index), x.shape, out.shape
        )
        index = self._ids("gather: index", index, len(x))
        flat = floats("gather: x", x, x.shape)
        self._run(gather_part, out.size, flat, index, out)

    def copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        require(source.shape == target.shape, "copy: {} into {}", source.shape, target.shape)
        np.copyto(target, source)

    # ---- rows in
    def embed(self, table: CpuTable, token_ids: I32, scale: float, out: F32) -> None:
        floats("embed: out", out, (len(token_ids), table.shape[1]))
        chosen = self._ids("embed: token ids", token_ids, table.shape[0])
        self._run(table.kernel, 4 * out.size, table.raw, chosen, float(scale), out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, *, add: bool = False, column: int = 0) -> None:
        rows, width = x.shape
        require(out.ndim == 2 and 0 <= column <= out.shape[1] - width, "rms_norm: column {} of {}", column, out.shape)
        self._run(
            norm.rms_norm_part, 4 * x.size,
            floats("rms_norm: x", x, (rows, width)), floats("rms_norm: weight", weight, (width,)), eps,
            floats("rms_norm: out", out, (rows, out.shape[1])), out.shape[1], column, add, rows,
        )  # fmt: skip

    def prepare(self, x: F32, norm: F32 | None, eps: float, weights: Sequence[CpuWeight]) -> CpuPrepared:
        rows: F32 = x
        if norm is not None:
            rows = self._scratch("prepare", x.size).reshape(x.shape)
            self.rms_norm(x, norm, eps, rows)
        return self._rounded("prepare", rows, weights)

    def _rounded(self, name: str, rows: F32, weights: Sequence[CpuWeight]) -> CpuPrepared:
        floats("prepare: x", rows, (len(rows), weights[0].shape[-1]))
        kinds = dict.fromkeys(weight.activation for weight in weights)
        rounded = {kind: self._recorder.rounded(name, kind, *rows.shape) for kind in kinds}
        parts = self._recorder.parts(4 * rows.size)
        self._recorder.run(*(quantize_command(rows, target, parts) for target in rounded.values()))
        return CpuPrepared(rows.shape, rounded)

    def _arrays(self, x: CpuPrepared, weights: Sequence[CpuWeight]) -> list[tuple[NDArray[Any], ...]]:
        """What the kernel of each weight reads; rows that it wants as floats are written out first, once."""
        arrays, before = [], []
        for weight in weights:
            rounded, kind = x.of(weight.activation), weight.activation
            if weight.interleaved or kind not in x.floats:
                found, command = arrays_of(weight, rounded, self._recorder.parts(rounded.values.size))
                if not weight.interleaved:
                    x.floats[kind] = found
                before += [command] if command else []
                arrays.append(found)
            else:
                arrays.append(x.floats[kind])
        if before:
            self._recorder.run(*before)
        return arrays

    def _product(
        self,
        weight: CpuWeight,
        arrays: tuple[NDArray[Any], ...],
        work: tuple[I32, ...],
        out: F32,
        bias: F32 | None = None,
        add: bool = False,
    ) -> Command:
        parts = self._recorder.parts(len(work[2]) * weight.shape[-2] * weight.shape[-1])
        return product(weight, arrays, work, out, bias, add, parts)

    def linear(
        self,
        x: CpuPrepared,
        weights: Sequence[CpuWeight],
        outs: Sequence[F32],
        biases: Sequence[F32 | None] | None = None,
        *,
        add: bool = False,
    ) -> None:
        biases = [None] * len(weights) if biases is None else biases
        for weight, out, bias in zip(weights, outs, biases, strict=True):
            floats("linear: out", out, (x.shape[0], weight.shape[0]))
            if bias is not None:
                floats("linear: bias", bias, weight.shape[:1])
        work = every_row(x.shape[0])
        arrays = self._arrays(x, weights)
        self._recorder.run(
            *(
                self._product(weight, read, work, out, bias, add)
                for weight, read, out, bias in zip(weights, arrays, outs, biases, strict=True)
            )
        )

    def gated_linear(
        self, x: CpuPrepared, gate: CpuWeight, up: CpuWeight, act: Activation, down: CpuWeight
    ) -> CpuPrepared:
        shape = (x.shape[0], gate.shape[0])
        y, z = (self._scratch(name, math.prod(shape)).reshape(shape) for name in ("gate", "up"))
        self.linear(x, [gate, up], [y, z])
        self._gate_up(y, z, act)
        return self._rounded("gated", y, [down])

    def _gate_up(self, gate: F32, up: F32, act: Activation) -> None:
        y, z = gate.reshape(-1), up.reshape(-1)
        self._run(activation.gate_up_part, 16 * y.size, y, z, y, act == "gelu")

    # ---- attention
    def rope_table(self, inverse_frequency: NDArray[np.float64], scale: float, length: int) -> F32:
        return cos_sin_table(inverse_frequency, scale, length)

    def qk_norm_rope(
        self,
        q: F32,
        k: F32,
        q_norm: F32 | None,
        k_norm: F32 | None,
        eps: float,
        positions: I32,
        table: F32,
        *,
        adjacent: bool,
    ) -> None:
        rows, heads, width = q.shape
        length, pairs = table.shape[1:]
        require(2 * pairs <= width, "rope: {} pairs do not fit in a head of {}", pairs, width)
        require(len(positions) == rows, "rope: {} positions for {} rows", len(positions), rows)
        self._run(
            rope.qk_norm_rope_part, 8 * (q.size + k.size),
            floats("rope: q", q, q.shape), floats("rope: k", k, (rows, k.shape[1], width)), heads, k.shape[1], width,
            _NO_FLOATS if q_norm is None else floats("rope: q_norm", q_norm, (width,)),
            _NO_FLOATS if k_norm is None else floats("rope: k_norm", k_norm, (width,)), eps,
            self._ids("rope: positions", positions, length), floats("rope: table", table, (2, length, pairs)),
            length, pairs, adjacent,
        )  # fmt: skip

    def kv_store(self, kv: KvLayer, rows: Rows, k: F32, v: F32) -> None:
        count, heads, width = k.shape
        self._kv_rows(rows, count, 1, kv.k.shape[0])
        commands = []
        for name, cache, new in (("k", kv.k, k), ("v", kv.v, v)):
            require(cache.shape[1:] == (heads, PAGE, width), "kv_store: {} into {}", k.shape, cache.shape)
            arguments = (
                floats(f"kv_store: {name}", new, k.shape), *_cache(cache, kv.k.shape),
                rows.pages, rows.sequence, rows.positions, heads, width,
            )  # fmt: skip
            commands.append(Command(attention.kv_store_part, arguments, self._recorder.parts(new.size)))
        self._recorder.run(*commands)

    def attention(self, q: F32, kv: KvLayer, rows: Rows, scale: float, window: int, gate: F32 | None, out: F32) -> None:
        count, heads, width = q.shape
        kv_heads = kv.k.shape[1]
        require(
            kv.k.shape[2:] == (PAGE, width) and heads % kv_heads == 0,
            "attention: queries {} do not fit a cache of {}",
            q.shape,
            kv.k.shape,
        )
        self._kv_rows(rows, count, window, kv.k.shape[0])
        (k, k_half), (v, v_half) = (_cache(cache, kv.k.shape) for cache in (kv.k, kv.v))
        reach = rows.pages.shape[1] * PAGE
        work = 2 * count * heads * width * (min(reach, window) if window else reach)
        threads = self._recorder.parts(work)
        shared = heads // kv_heads if count * kv_heads >= threads else 1
        block = max(1, min(ATTENTION_ROWS, count * kv_heads // threads))
        self._run(
            attention.attention_part, work,
            floats("attention: q", q, q.shape), k, v, k_half, v_half,
            _NO_FLOATS if gate is None else floats("attention: gate", gate, q.shape),
            rows.pages, rows.sequence, rows.positions, heads, kv_heads, block, shared, width, scale, window,
            self._scratch("attention", threads * attention.scratch_size(block * shared, width)),
            floats("attention: out", out, q.shape),
        )  # fmt: skip

    # ---- Gated DeltaNet
    def conv_silu_l2(self, u: F32, taps: F32, conv_window: F32, rows: Rows, eps: float, q: F32, k: F32, v: F32) -> None:
        count, width = u.shape
        heads, size = q.shape[1:]
        length = taps.shape[1]
        require(size % 16 == 0 and length >= 2, "convolution: heads of {} (not of 16) or {} taps", size, length)
        require((width - 2 * heads * size) % size == 0, "convolution: {} channels in heads of {}", width, size)
        self._recurrent_rows(rows, count, len(conv_window))
        self._run(
            conv.conv_silu_l2_part, 8 * u.size,
            floats("convolution: u", u, (count, width)), floats("convolution: taps", taps, (width, length)),
            floats("convolution: window", conv_window, (len(conv_window), length - 1, width)),
            rows.starts, rows.read, rows.write, eps,
            floats("convolution: q", q, (count, heads, size)), floats("convolution: k", k, (count, heads, size)),
            floats("convolution: v", v, (count, width // size - 2 * heads, size)), length, heads, size,
            self._scratch("convolution", self._recorder.parts(8 * u.size) * length * size),
        )  # fmt: skip

    def gdn_gates(self, alpha: F32, beta: F32, a: F32, dt: F32, g: F32, b: F32) -> None:
        shape = (len(alpha), len(a))
        arrays = (floats("gdn_gates: alpha, beta, g, b", array, shape) for array in (alpha, beta, g, b))
        flat_alpha, flat_beta, flat_g, flat_b = arrays
        a, dt = floats("gdn_gates: a", a, (len(a),)), floats("gdn_gates: dt", dt, (len(a),))
        self._run(activation.gates_part, 32 * flat_g.size, flat_alpha, flat_beta, a, dt, flat_g, flat_b)

    def gated_delta(
        self, q: F32, k: F32, v: F32, g: F32, b: F32, key_head: I32, state: F32, rows: Rows, out: F32
    ) -> None:
        count, key_heads, key_width = q.shape
        heads, value_width = v.shape[1:]
        require(
            key_width % 16 == 0 and value_width % gated_delta.TILE == 0, "gated_delta: heads {} {}", q.shape, v.shape
        )
        require(len(key_head) == heads, "gated_delta: {} key heads named for {} heads", len(key_head), heads)
        self._recurrent_rows(rows, count, len(state))
        self._run(
            gated_delta.gated_delta_part, 2 * v.size * key_width,
            floats("gated_delta: q", q, q.shape), floats("gated_delta: k", k, q.shape),
            floats("gated_delta: v", v, (count, heads, value_width)), floats("gated_delta: g", g, (count, heads)),
            floats("gated_delta: b", b, (count, heads)), ids("gated_delta: key_head", key_head, key_heads),
            floats("gated_delta: state", state, (len(state), heads, value_width, key_width)),
            rows.starts, rows.read, rows.write, floats("gated_delta: out", out, v.shape),
            key_heads, key_width, value_width, 1.0 / math.sqrt(key_width),
        )  # fmt: skip

    def gated_norm(self, x: F32, weight: F32, z: F32, eps: float) -> None:
        require(x.shape[-1] % 16 == 0, "gated_norm: heads of {}, not a multiple of 16", x.shape[-1])
        self._run(
            norm.gated_norm_part, 16 * x.size,
            floats("gated_norm: x", x, x.shape), floats("gated_norm: weight", weight, x.shape[-1:]),
            floats("gated_norm: z", z, x.shape), eps, x.size // x.shape[-1],
        )  # fmt: skip

    # ---- experts
    def route(self, logits: F32, used: int, scale: float) -> tuple[I32, F32]:
        rows, experts = logits.shape
        require(0 < used <= experts, "route: {} of {} experts", used, experts)
        chosen = self._scratch("route ids", rows * used, np.int32).reshape(rows, used)
        weights = self._scratch("route weights", rows * used).reshape(rows, used)
        work = 16 * logits.size
        self._run(
            moe.route_part, work, floats("route: logits", logits, logits.shape), experts, used, float(scale),
            self._scratch("route", self._recorder.parts(work) * experts), chosen.reshape(-1), weights.reshape(-1),
        )  # fmt: skip
        return chosen, weights

    def experts(
        self,
        x: CpuPrepared,
        gate: CpuWeight,
        up: CpuWeight,
        down: CpuWeight,
        act: Activation,
        expert_ids: I32,
        weights: F32,
        out: F32,
    ) -> None:
        rows, used = integers("experts: ids", expert_ids, 2).shape
        if not self._recorder.recording:  # else they come from `route`
            ids("experts: ids", expert_ids, gate.shape[0], 2)
        pairs, hidden, width = rows * used, gate.shape[1], down.shape[1]
        y, z = (self._scratch(name, pairs * hidden).reshape(pairs, hidden) for name in ("gate", "up"))
        expert, each = expert_ids.reshape(-1), np.arange(pairs, dtype=np.int32)
        work, group = gathered(each // np.int32(used), expert, gate.shape[0])
        self._recorder.run(group)
        for_gate, for_up = self._arrays(x, [gate, up])
        self._recorder.run(self._product(gate, for_gate, work, y), self._product(up, for_up, work, z))
        self._gate_up(y, z, act)
        results = self._scratch("experts", pairs * width).reshape(pairs, width)
        prepared = self._rounded("experts", y, [down])
        work = (work[0], work[1], work[3], work[3])  # each pair has a row of its own now
        (for_down,) = self._arrays(prepared, [down])
        self._recorder.run(self._product(down, for_down, work, results))
        self._run(
            moe.sum_experts_part, 2 * results.size, results.reshape(-1),
            floats("experts: weights", weights, (rows, used)), used, width, floats("experts: out", out, (rows, width)),
        )  # fmt: skip

    def gated_add(self, x: F32, gate: F32, out: F32) -> None:
        flat_gate = floats("gated_add: gate", gate, (len(x), 1))
        flat_x, flat_out = floats("gated_add: x", x, x.shape), floats("gated_add: out", out, x.shape)
        self._run(activation.gated_add_part, 2 * x.size, flat_x, flat_gate, flat_out)

    # ---- rows out
    def softcap(self, x: F32, cap: float) -> None:
        self._run(activation.softcap_part, 16 * x.size, floats("softcap: x", x, x.shape), float(cap))


def _cache(cache: NDArray[Any], shape: tuple[int, ...]) -> tuple[F32, NDArray[np.uint16]]:
    """One half of a KvLayer as kernels take it: float32 values or float16 bits, the other empty."""
    if cache.dtype == np.uint16 and cache.shape == shape and cache.flags.c_contiguous:
        return _NO_FLOATS, cache.reshape(-1)
    return floats("cache", cache, shape), _NO_HALVES
