"""Model configurations: every architecture, per-layer values, the four ways NextN blocks are counted, bad values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dotllm.errors import ModelFileError, UnsupportedModel
from dotllm.gguf.hparams import ARCHITECTURES, ExpertConfig, ModelConfig, RecurrentConfig, RopeConfig
from dotllm.gguf.reader import GGUFFile

Tiny = Callable[..., Path]


def load(path: Path) -> ModelConfig:
    with GGUFFile.open(path) as file:
        return ModelConfig.from_gguf(file)


def changed(path: Path, *, without: str = "", **metadata: Any) -> ModelConfig:
    """The configuration of a file with other metadata; "__" in a name stands for a dot, None removes the key.

    `without`: tensors whose names contain this are absent.
    """
    with GGUFFile.open(path) as file:
        architecture = metadata.get("general__architecture", file.metadata["general.architecture"])
        values = {name: file.metadata[name] for name in file.metadata if not name.startswith("tokenizer.")}
        for name, value in metadata.items():
            full = name.replace("__", ".")
            values[full if full.startswith("general.") else f"{architecture}.{full}"] = value
        values = {name: value for name, value in values.items() if value is not None}
        tensors = {n: t for n, t in file.tensors.items() if not (without and without in n)}
        other = SimpleNamespace(path=path, metadata=values, tensors=tensors, tensor=file.tensor)
        return ModelConfig.from_gguf(cast(GGUFFile, other))


def kinds(config: ModelConfig) -> str:
    return "".join(layer.kind[0] for layer in config.layers)


# ---- architectures


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(tiny_gguf: Tiny, arch: str) -> None:
    config = load(tiny_gguf(arch))
    hybrid = arch in ("qwen35", "qwen35moe", "qwen3next")
    assert (config.architecture, config.name, config.file_type) == (arch, f"tiny-{arch}", "F32")
    assert (config.vocab_size, config.context_length, config.embedding_length) == (304, 4096, 64)
    assert config.rms_epsilon == pytest.approx(1e-6)
    assert config.attention_scale == 1 / math.sqrt(config.head_dim)
    assert config.gated_attention == hybrid
    assert config.tied_output == (arch != "llama")
    assert (config.mtp is not None) == hybrid == (config.mtp_note == "")
    assert (config.recurrent is not None) == hybrid
    assert (config.experts is not None) == (arch in ("qwen35moe", "qwen3next"))
    assert (config.activation, config.embedding_scale) == (("gelu", 8.0) if arch == "gemma3" else ("silu", 1.0))
    assert {layer.rope.style for layer in config.layers} == {"adjacent" if arch == "llama" else "neox"}


def test_hybrid(tiny_gguf: Tiny) -> None:
    config = load(tiny_gguf("qwen35", layers=8, interval=4, v_per_k=3, untied=True))
    assert kinds(config) == "rrrarrra"
    assert not config.tied_output
    assert config.recurrent == RecurrentConfig(16, 2, 6, 4, interleaved=False)
    assert (config.recurrent.key_width, config.recurrent.value_width, config.recurrent.conv_width) == (32, 96, 160)
    attention = config.layers[3]
    assert (attention.heads, attention.kv_heads, attention.feed_forward_length, attention.window) == (4, 2, 96, 0)
    assert attention.rope == RopeConfig(16, 1e7, 1.0, "neox", (3, 3, 2, 0))
    assert (config.layers[0].heads, config.layers[0].kv_heads, config.layers[0].experts) == (0, 0, False)
    assert config.mtp == attention


def test_experts(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("qwen35moe")
    config = load(path)
    assert config.experts == ExpertConfig(6, 2, 96, 96, 1.0)
    assert all(layer.experts for layer in config.layers)
    assert config.mtp is not None
    assert config.mtp.experts
    unnamed = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    assert changed(path, **unnamed, expert_weights_scale=2.5).experts == ExpertConfig(6, 2, 48, 96, 2.5)
    assert changed(path, without="_shexp").experts == ExpertConfig(6, 2, 96, 0, 1.0)
    recurrent = load(tiny_gguf("qwen3next")).recurrent
    assert recurrent is not None
    assert recurrent.interleaved


def test_gemma3(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("gemma3")
    config = load(path)
    local, far = config.layers[0], config.layers[5]
    assert [layer.window for layer in config.layers] == [8, 8, 8, 8, 8, 0, 8, 8]
    assert local.rope == RopeConfig(32, 1e4, 1.0, "neox", ())
    assert far.rope == RopeConfig(32, 1e6, 0.125, "neox", ())
    assert config.logit_softcap == 0.0
    other = changed(path, final_logit_softcapping=30.0, rope__freq_base_swa=5e4)
    assert (other.logit_softcap, other.layers[0].rope.base) == (30.0, 5e4)
    assert [layer.window for layer in changed(path, attention__sliding_window_pattern=2).layers] == [8, 0] * 4
    listed = changed(path, attention__sliding_window_pattern=np.array([True, False] * 4)).layers
    assert [layer.window for layer in listed] == [8, 0] * 4


def test_gemma3_with_62_layers_scales_by_embedding_and_heads(tiny_gguf: Tiny) -> None:
    config = load(tiny_gguf("gemma3", layers=62))
    assert config.attention_scale == 1 / math.sqrt(64 // 4)
    assert config.embedding_scale == np.float32(np.sqrt(64))


def test_embedding_scale_is_rounded_to_float32(tiny_gguf: Tiny) -> None:
    scale = load(tiny_gguf("gemma3", layers=1, embedding=96)).embedding_scale
    assert scale == np.float32(math.sqrt(96))
    assert scale != math.sqrt(96)


def test_sliding_window_of_a_llama(tiny_gguf: Tiny) -> None:
    config = load(tiny_gguf("llama", window=16))
    assert [layer.window for layer in config.layers] == [16, 16, 16]
    assert [layer.window for layer in load(tiny_gguf("llama")).layers] == [0, 0, 0]


# ---- values that come in several forms


def test_whole_numbers_of_any_width_and_arrays_per_layer(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("qwen3")
    config = changed(
        path,
        attention__head_count_kv=np.array([1, 2, 4], np.int32),
        feed_forward_length=np.array([96, 128, 160], np.uint64),
        rope__freq_base=None,
    )
    assert [layer.kv_heads for layer in config.layers] == [1, 2, 4]
    assert [layer.feed_forward_length for layer in config.layers] == [96, 128, 160]
    assert config.layers[0].rope.base == 1e4


def test_recurrent_layers_override_the_interval(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("qwen35")
    assert kinds(load(path)) == "rara"
    assert kinds(changed(path, full_attention_interval=None)) == "rrra"
    listed = np.array([False, True, True, True, True])
    config = changed(path, attention__recurrent_layers=listed)
    assert kinds(config) == "arrr"
    assert config.mtp is not None
    assert config.mtp.kind == "attention"


def test_kv_heads_of_recurrent_layers_may_be_zero(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("qwen35")
    config = changed(path, attention__head_count_kv=np.array([0, 2, 0, 2], np.uint32))
    assert [layer.kv_heads for layer in config.layers] == [0, 2, 0, 2]
    assert config.mtp is not None
    assert config.mtp.kv_heads == 2


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 0.25),
        ({"rope__scaling__factor": 4.0}, 0.25),
        ({"rope__scale_linear": 2.0}, 0.5),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
        ({"rope__scaling__type": "linear"}, 1.0),
        ({}, 1.0),
    ],
)
def test_rope_scaling(tiny_gguf: Tiny, keys: dict[str, Any], scale: float) -> None:
    assert changed(tiny_gguf("llama"), **keys).layers[0].rope.scale == scale


@pytest.mark.parametrize("kind", ["yarn", "longrope", "su"])
def test_other_rope_scaling_is_refused_by_name(tiny_gguf: Tiny, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        changed(tiny_gguf("llama"), rope__scaling__type=kind)


def test_name_and_file_type(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("qwen35", "Q8_0")
    assert load(path).file_type == "Q8_0"
    assert changed(path, general__file_type=15).file_type == "Q4_K_M"
    assert changed(path, general__file_type=999).file_type == "Q8_0"
    assert changed(path, general__name=None).name == path.stem


# ---- main layers and NextN block


@pytest.mark.parametrize(
    ("options", "whole", "note"),
    [
        ({}, True, ""),
        ({"nextn_counted": False}, True, ""),
        ({"nextn_key": False}, True, ""),
        ({"nextn_key": False, "nextn_counted": False}, True, ""),
        ({"nextn_tensors": False}, False, "MTP tensors missing: blk.4.nextn.*"),
        ({"nextn_tensors": False, "nextn_counted": False}, False, "MTP tensors missing: blk.4.nextn.*"),
        ({"nextn": 0}, False, "no MTP head"),
        ({"nextn": 2}, True, ""),
    ],
)
def test_nextn_blocks_however_counted(tiny_gguf: Tiny, options: dict[str, Any], whole: bool, note: str) -> None:
    config = load(tiny_gguf("qwen35", **options))
    assert kinds(config) == "rara"
    assert (config.mtp is not None) == whole
    assert config.mtp_note == note


def test_a_head_that_lacks_tensors_is_off_and_says_why(tiny_gguf: Tiny) -> None:
    config = changed(tiny_gguf("qwen35"), without="blk.4.nextn.hnorm")
    assert config.mtp is None
    assert config.mtp_note == "MTP tensors missing: blk.4.nextn.hnorm.weight"
    assert kinds(config) == "rara"
    moe = changed(tiny_gguf("qwen35moe"), without="blk.4.ffn_up_exps")
    assert moe.mtp_note == "MTP tensors missing: blk.4.ffn_up_exps.weight"
    optional = load(tiny_gguf("qwen35", head_norm=False))
    assert optional.mtp is not None


def test_a_file_with_the_head_alone(tiny_gguf: Tiny) -> None:
    with pytest.raises(UnsupportedModel, match="main layers are not in this file"):
        changed(tiny_gguf("qwen35"), without="blk.0.")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_block_count_that_fits_no_reading(tiny_gguf: Tiny, count: int) -> None:
    with pytest.raises(ModelFileError, match="block_count"):
        changed(tiny_gguf("qwen35"), block_count=count)


# ---- what is refused


def test_unknown_architecture_lists_the_known(tiny_gguf: Tiny) -> None:
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2, qwen3, gemma3, qwen35, qwen35moe, qwen3next"):
        changed(tiny_gguf("llama"), general__architecture="mamba")
    with pytest.raises(ModelFileError, match=r"general\.architecture is missing"):
        changed(tiny_gguf("llama"), general__architecture=None)


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("llama", "block_count", None),
        ("llama", "block_count", 0),
        ("llama", "block_count", 1 << 40),
        ("llama", "block_count", "3"),
        ("llama", "context_length", 0),
        ("llama", "context_length", 4096.0),
        ("llama", "embedding_length", True),
        ("llama", "embedding_length", 128),
        ("llama", "attention.head_count", 0),
        ("llama", "attention.head_count", 3),
        ("llama", "attention.head_count", -4),
        ("llama", "attention.head_count", np.zeros(3, np.int32)),
        ("llama", "attention.head_count_kv", 3),
        ("llama", "attention.head_count_kv", 0),
        ("llama", "attention.head_count_kv", np.array([2], np.int32)),
        ("llama", "attention.head_count_kv", np.array([2.0, 2.0, 2.0])),
        ("llama", "attention.head_count_kv", ["2", "2", "2"]),
        ("llama", "attention.layer_norm_rms_epsilon", 0.0),
        ("llama", "attention.layer_norm_rms_epsilon", -1e-6),
        ("llama", "attention.layer_norm_rms_epsilon", math.nan),
        ("llama", "attention.layer_norm_rms_epsilon", "1e-6"),
        ("llama", "attention.sliding_window", -1),
        ("llama", "feed_forward_length", 0),
        ("llama", "rope.dimension_count", 15),
        ("llama", "rope.dimension_count", 18),
        ("llama", "rope.freq_base", 0.0),
        ("llama", "rope.freq_base", math.inf),
        ("llama", "rope.scaling.factor", -2.0),
        ("llama", "rope.scaling.type", 1),
        ("qwen3", "attention.key_length", 0),
        ("qwen3", "attention.value_length", 16),
        ("gemma3", "final_logit_softcapping", -1.0),
        ("gemma3", "attention.sliding_window_pattern", 0),
        ("qwen35", "nextn_predict_layers", 6),
        ("qwen35", "full_attention_interval", 0),
        ("qwen35", "attention.recurrent_layers", np.array([True, False])),
        ("qwen35", "rope.dimension_sections", np.array([3, 3, 2])),
        ("qwen35", "rope.dimension_sections", np.zeros(4, np.int32)),
        ("qwen35", "rope.dimension_sections", np.array([3, -3, 2, 0])),
        ("qwen35", "ssm.state_size", 0),
        ("qwen35", "ssm.group_count", 3),
        ("qwen35", "ssm.inner_size", 65),
        ("qwen35", "ssm.conv_kernel", 1),
        ("qwen35moe", "expert_count", None),
        ("qwen35moe", "expert_used_count", 7),
        ("qwen35moe", "expert_weights_scale", -1.0),
    ],
)
def test_values_out_of_range(tiny_gguf: Tiny, arch: str, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError):
        changed(tiny_gguf(arch), **{key.replace(".", "__"): value})


def test_recurrent_heads_that_no_kernel_takes(tiny_gguf: Tiny) -> None:
    with pytest.raises(UnsupportedModel, match=r"ssm\.state_size is 24; a multiple of 16"):
        ModelConfig.from_gguf(GGUFFile.open(tiny_gguf("qwen35", state=24)))


def test_errors_name_file_and_key(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("llama")
    with pytest.raises(ModelFileError, match=r"key llama\.context_length is missing") as error:
        changed(path, context_length=None)
    assert str(path) in str(error.value)


def test_experts_in_an_architecture_without_them(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("llama")) as file:
        tensors = {**file.tensors, "blk.0.ffn_gate_inp.weight": file.tensor("output_norm.weight")}
        other = SimpleNamespace(path=file.path, metadata=file.metadata, tensors=tensors, tensor=file.tensor)
        with pytest.raises(UnsupportedModel, match="llama with a mixture of experts"):
            ModelConfig.from_gguf(cast(GGUFFile, other))


def test_embedding_of_another_shape(tiny_gguf: Tiny) -> None:
    with pytest.raises(ModelFileError, match=r"token_embd\.weight has shape"):
        changed(tiny_gguf("qwen3"), embedding_length=32)


def test_a_head_with_merged_expert_tensors_is_whole(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("qwen35moe")) as file:
        merged = {name.replace("ffn_gate_exps", "ffn_gate_up_exps"): tensor for name, tensor in file.tensors.items()}
        tensors = {name: tensor for name, tensor in merged.items() if "ffn_up_exps" not in name}
        other = SimpleNamespace(path=file.path, metadata=file.metadata, tensors=tensors, tensor=file.tensor)
        assert ModelConfig.from_gguf(cast(GGUFFile, other)).mtp is not None
