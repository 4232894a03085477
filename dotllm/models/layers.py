"""The layers that families are built from: attention, dense and expert feed-forward, Gated DeltaNet.

Each takes prepared (normed and rounded) rows and adds its result to the residual stream `x`, or writes it there.
"""

from __future__ import annotations

import numpy as np

from dotllm.gguf.hparams import LayerConfig, RecurrentConfig
from dotllm.models.base import Loader, flat
from dotllm.ops.protocol import Array, KvLayer, Prepared, Rows, Weight
from dotllm.state.step import Step

__all__ = ["Attention", "DenseFeedForward", "ExpertFeedForward", "GatedDeltaNet"]


class Attention:
    """Grouped-query attention; optional biases, q/k norms, window and output gate, as the tensors and config say."""

    def __init__(self, load: Loader, prefix: str, layer: LayerConfig) -> None:
        c = load.config
        self.ops, self.ws, self.config, self.layer = load.ops, load.workspace, c, layer
        heads, kv_heads, width, embedding = layer.heads, layer.kv_heads, c.head_dim, c.embedding_length
        self.gate: Weight | None = None
        if c.gated_attention:  # rows of one head: its queries, then its gate
            shape = (2 * heads * width, embedding)
            load.check(f"{prefix}attn_q.weight", *shape)
            row = np.arange(2 * heads * width).reshape(heads, 2, width)
            self.q = load.matrix(f"{prefix}attn_q.weight", *shape, rows=row[:, 0].ravel())
            self.gate = load.matrix(f"{prefix}attn_q.weight", *shape, rows=row[:, 1].ravel())
        else:
            self.q = load.matrix(f"{prefix}attn_q.weight", heads * width, embedding)
        self.k = load.matrix(f"{prefix}attn_k.weight", kv_heads * width, embedding)
        self.v = load.matrix(f"{prefix}attn_v.weight", kv_heads * width, embedding)
        self.output = load.matrix(f"{prefix}attn_output.weight", embedding, heads * width)
        self.q_norm = load.optional_vector(f"{prefix}attn_q_norm.weight", width)
        self.k_norm = load.optional_vector(f"{prefix}attn_k_norm.weight", width)
        widths = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
        self.biases = [load.optional_vector(f"{prefix}attn_{n}.bias", w) for n, w in widths.items()]
        self.rope = load.rope_table(layer.rope)
        self.inputs = [self.q, self.k, self.v] + ([self.gate] if self.gate is not None else [])

    def __call__(self, h: Prepared, rows: Rows, kv: KvLayer, out: Array, *, add: bool = True) -> None:
        ops, layer, eps, m, width = self.ops, self.layer, self.config.rms_epsilon, out.shape[0], self.config.head_dim
        q = self.ws.rows("q", m, layer.heads, width)
        k = self.ws.rows("k", m, layer.kv_heads, width)
        v = self.ws.rows("v", m, layer.kv_heads, width)
        gate = None if self.gate is None else self.ws.rows("gate", m, layer.heads, width)
        attended = self.ws.rows("attended", m, layer.heads, width)
        outs = [flat(q), flat(k), flat(v)] + ([flat(gate)] if gate is not None else [])
        biases = [*self.biases, None] if gate is not None else self.biases
        ops.linear(h, self.inputs, outs, biases)
        ops.qk_norm_rope(
            q, k, self.q_norm, self.k_norm, eps, rows.positions, self.rope, adjacent=layer.rope.style == "adjacent"
        )
        ops.kv_store(kv, rows, k, v)
        ops.attention(q, kv, rows, self.config.attention_scale, layer.window, gate, attended)
        prepared = ops.prepare(flat(attended), None, eps, [self.output])
        ops.linear(prepared, [self.output], [out], add=add)


class DenseFeedForward:
    """down(act(gate x) * (up x))."""

    def __init__(self, load: Loader, prefix: str, layer: LayerConfig) -> None:
        self.ops, self.activation = load.ops, load.config.activation
        width, hidden = load.config.embedding_length, layer.feed_forward_length
        self.gate = load.matrix(f"{prefix}ffn_gate.weight", hidden, width)
        self.up = load.matrix(f"{prefix}ffn_up.weight", hidden, width)
        self.down = load.matrix(f"{prefix}ffn_down.weight", width, hidden)
        self.inputs = [self.gate, self.up]

    def __call__(self, h: Prepared, out: Array, *, add: bool = True) -> None:
        hidden = self.ops.gated_linear(h, self.gate, self.up, self.activation, self.down)
        self.ops.linear(hidden, [self.down], [out], add=add)


class ExpertFeedForward:
    """The best experts of each row, weighted, plus a shared expert behind a sigmoid gate."""

    def __init__(self, load: Loader, prefix: str) -> None:
        config = load.config
        experts, width = config.experts, config.embedding_length
        if experts is None:
            raise ValueError("a model without experts has no ExpertFeedForward")
        self.ops, self.ws, self.config, self.experts = load.ops, load.workspace, config, experts
        count, hidden, shared = experts.count, experts.feed_forward_length, experts.shared_feed_forward_length
        self.router = load.matrix(f"{prefix}ffn_gate_inp.weight", count, width)
        merged = f"{prefix}ffn_gate_up_exps.weight"
        if load.has(merged):
            shape = (count, 2 * hidden, width)
            load.check(merged, *shape)
            self.gate = load.matrix(merged, *shape, rows=np.arange(hidden))
            self.up = load.matrix(merged, *shape, rows=np.arange(hidden, 2 * hidden))
        else:
            self.gate = load.matrix(f"{prefix}ffn_gate_exps.weight", count, hidden, width)
            self.up = load.matrix(f"{prefix}ffn_up_exps.weight", count, hidden, width)
        self.down = load.matrix(f"{prefix}ffn_down_exps.weight", count, width, hidden)
        self.shared_switch = load.matrix(f"{prefix}ffn_gate_inp_shexp.weight", width)
        self.shared_gate = load.matrix(f"{prefix}ffn_gate_shexp.weight", shared, width)
        self.shared_up = load.matrix(f"{prefix}ffn_up_shexp.weight", shared, width)
        self.shared_down = load.matrix(f"{prefix}ffn_down_shexp.weight", width, shared)
        self.inputs = [self.router, self.shared_switch, self.gate, self.up, self.shared_gate, self.shared_up]

    def __call__(self, h: Prepared, x: Array) -> None:
        ops, act, m = self.ops, self.config.activation, x.shape[0]
        logits = self.ws.rows("router", m, self.experts.count)
        switch = self.ws.rows("shared_switch", m, 1)
        shared = self.ws.rows("shared", m, x.shape[1])
        ops.linear(h, [self.router, self.shared_switch], [logits, switch])
        ids, weights = ops.route(logits, self.experts.used, self.experts.weights_scale)
        ops.experts(h, self.gate, self.up, self.down, act, ids, weights, x)
        hidden = ops.gated_linear(h, self.shared_gate, self.shared_up, act, self.shared_down)
        ops.linear(hidden, [self.shared_down], [shared])
        ops.gated_add(shared, switch, x)


class GatedDeltaNet:
    """A recurrent layer: short convolution, gated delta rule per head, gated norm. Uses no positions."""

    def __init__(self, load: Loader, prefix: str, recurrent: RecurrentConfig, index: int) -> None:
        self.ops, self.ws, self.eps, self.recurrent = load.ops, load.workspace, load.config.rms_epsilon, recurrent
        self.index = index
        width, r = load.config.embedding_length, recurrent
        self._load_projections(load, prefix)
        self.taps = load.vector(f"{prefix}ssm_conv1d.weight", r.conv_width, r.conv_kernel)
        self.a = load.vector(f"{prefix}ssm_a", r.v_heads)
        self.dt = load.vector(f"{prefix}ssm_dt.bias", r.v_heads)
        self.norm = load.vector(f"{prefix}ssm_norm.weight", r.state_size)
        self.output = load.matrix(f"{prefix}ssm_out.weight", width, r.value_width)
        self.inputs = [self.qkv, self.z, self.beta, self.alpha]

    def _load_projections(self, load: Loader, prefix: str) -> None:
        r, width = self.recurrent, load.config.embedding_length
        per_key = r.v_heads // r.k_heads
        if load.has(f"{prefix}ssm_in.weight"):  # one key head after another: its q, k, values and gates
            name, group = f"{prefix}ssm_in.weight", 2 * r.state_size * (1 + per_key)
            shape = (r.k_heads * group, width)
            load.check(name, *shape)
            row = np.arange(r.k_heads * group).reshape(r.k_heads, group)
            ends = np.cumsum([r.state_size, r.state_size, per_key * r.state_size])
            q, k, v, z = (part.ravel() for part in np.split(row, ends, axis=1))
            self.qkv = load.matrix(name, *shape, rows=np.concatenate([q, k, v]))
            self.z = load.matrix(name, *shape, rows=z)
        else:
            self.qkv = load.matrix(f"{prefix}attn_qkv.weight", r.conv_width, width)
            self.z = load.matrix(f"{prefix}attn_gate.weight", r.value_width, width)
        if load.has(f"{prefix}ssm_ba.weight"):  # one key head after another: its betas, then its alphas
            pair = np.arange(2 * r.v_heads).reshape(r.k_heads, 2, per_key)
            shape = (2 * r.v_heads, width)
            self.beta = load.matrix(f"{prefix}ssm_ba.weight", *shape, rows=pair[:, 0].ravel())
            self.alpha = load.matrix(f"{prefix}ssm_ba.weight", *shape, rows=pair[:, 1].ravel())
        else:
            self.beta = load.matrix(f"{prefix}ssm_beta.weight", r.v_heads, width)
            self.alpha = load.matrix(f"{prefix}ssm_alpha.weight", r.v_heads, width)

    def __call__(self, h: Prepared, rows: Rows, step: Step, x: Array) -> None:
        ops, r, m, i = self.ops, self.recurrent, x.shape[0], self.index
        z = self.ws.rows("z", m, r.v_heads, r.state_size)
        o = self.ws.rows("o", m, r.v_heads, r.state_size)
        alpha, beta = self.ws.rows("alpha", m, r.v_heads), self.ws.rows("beta", m, r.v_heads)
        u, q, k, v, g, b = step.buffers(i, m)
        ops.linear(h, self.inputs, [u, flat(z), beta, alpha])
        ops.conv_silu_l2(u, self.taps, step.recurrent.conv[i], rows, self.eps, q, k, v)
        ops.gdn_gates(alpha, beta, self.a, self.dt, g, b)
        ops.gated_delta(q, k, v, g, b, step.key_head, step.recurrent.state[i], rows, o)
        ops.gated_norm(o, self.norm, z, self.eps)
        ops.linear(ops.prepare(flat(o), None, self.eps, [self.output]), [self.output], [x], add=True)
