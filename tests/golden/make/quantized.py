"""Cases whose weights are in few bits; the mathematics is in float32."""

import json
import os
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.golden.make.deepseek import deepseek_hub
from tests.golden.make.gpt import gpt_oss_hub
from tests.golden.make.llama import CAUSAL
from tests.golden.make.mutations import setc
from tests.golden.make.weights import load

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def mxfp4_pack(w):
    """[..., K] -> blocks uint8 [..., K/32, 16] (low nibble = even index), scales uint8 [..., K/32] (exponent + 127)."""
    w = w.numpy().astype(np.float64)
    g = w.reshape(*w.shape[:-1], -1, 32)
    e = np.floor(np.log2(np.abs(g).max(-1) + 1e-30)) - 2
    y = g / np.exp2(e)[..., None]
    c = np.abs(np.abs(y)[..., None] - FP4[:8]).argmin(-1) + np.where(y < 0, 8, 0)
    blocks = (c[..., 0::2] | (c[..., 1::2] << 4)).astype(np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy((e + 127).astype(np.uint8))


def dense_load(d, cls, sd, config):
    """Load `sd` (dense, Hub names) with the config of directory `d` minus its quantization_config."""
    cfg = config if config is not None else cls.config_class.from_pretrained(d)
    if hasattr(cfg, "quantization_config"):
        del cfg.quantization_config
    with tempfile.TemporaryDirectory() as td:
        save_file(
            {k: v.contiguous() for k, v in sd.items()}, os.path.join(td, "model.safetensors"), metadata={"format": "pt"}
        )
        cfg.save_pretrained(td)
        return load(td, cls)


def add_quant_cfg(d, qc):
    p = os.path.join(d, "config.json")
    with open(p) as f:
        c = json.load(f)
    c["quantization_config"] = qc
    with open(p, "w") as f:
        json.dump(c, f, indent=2, sort_keys=True)


def mx_encode(sd):
    out = {}
    for k, v in sd.items():
        if k.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            out[k + "_blocks"], out[k + "_scales"] = mxfp4_pack(v.transpose(1, 2))  # [E, K, N] -> [E, N, K]
        else:
            out[k] = v
    return out


def mx_decode(sd):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    out = {}
    for k, v in sd.items():
        if k.endswith("_blocks"):
            out[k[:-7]] = convert_moe_packed_tensors(v, sd[k[:-7] + "_scales"], dtype=torch.float32)
        elif not k.endswith("_scales"):
            out[k] = v
    return out


FP8_BS = 16


def fp8_encode(sd):
    out = {}
    for k, v in sd.items():
        if k.endswith(("proj.weight", "kv_a_proj_with_mqa.weight")):
            o, i = v.shape
            O, I = -(-o // FP8_BS), -(-i // FP8_BS)
            p = torch.zeros(O * FP8_BS, I * FP8_BS)
            p[:o, :i] = v
            b = p.view(O, FP8_BS, I, FP8_BS)
            sc = b.abs().amax((1, 3)) / 448.0
            q = (b / sc[:, None, :, None]).to(torch.float8_e4m3fn).view(O * FP8_BS, I * FP8_BS)[:o, :i].contiguous()
            out[k] = q
            out[k + "_scale_inv"] = sc.float()
        else:
            out[k] = v
    return out


def fp8_decode(sd):
    out = {}
    for k, v in sd.items():
        if k.endswith("_scale_inv"):
            continue
        if k + "_scale_inv" in sd:
            s_ = (
                sd[k + "_scale_inv"]
                .repeat_interleave(FP8_BS, 0)
                .repeat_interleave(FP8_BS, 1)[: v.shape[0], : v.shape[1]]
            )
            v = v.float() * s_
        out[k] = v
    return out


def quant_case(enc, dec, qc):
    def dump(m):
        with tempfile.TemporaryDirectory() as td:
            m.save_pretrained(td)
            return load_file(os.path.join(td, "model.safetensors"))

    def post_init(m, name, seed):
        with tempfile.TemporaryDirectory() as td:
            m.config.save_pretrained(td)
            return dense_load(td, type(m), dec(enc(dump(m))), None)

    def save(m, d):
        m.save_pretrained(d)
        sd = enc(load_file(os.path.join(d, "model.safetensors")))
        save_file(
            {k: v.contiguous() for k, v in sd.items()}, os.path.join(d, "model.safetensors"), metadata={"format": "pt"}
        )
        add_quant_cfg(d, qc)

    def ld(d, cls, config=None):
        return dense_load(d, cls, dec(load_file(os.path.join(d, "model.safetensors"))), config)

    return dict(post_init=post_init, save=save, load=ld)


MXQ = dict(
    quant_method="mxfp4",
    modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
)
F8Q = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[FP8_BS, FP8_BS])
CASES = {}
CASES["gpt_oss_mxfp4"] = dict(
    hub=gpt_oss_hub(
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_per_token=2,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        quantization_config=MXQ,
    ),
    io=CAUSAL,
    gains=dict(gate_up=4.5, down=0.8, router=2.0, bias=0.4),
    mut={"no clamp": setc(swiglu_limit=1e9)},
    **quant_case(mx_encode, mx_decode, MXQ),
)
CASES["deepseek_v3_fp8"] = dict(
    hub=deepseek_hub(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        v_head_dim=8,
        quantization_config=F8Q,
    ),
    io=CAUSAL,
    gains=dict(router=2.5),
    mut={"n_group 1": setc(n_group=1, topk_group=1)},
    **quant_case(fp8_encode, fp8_decode, F8Q),
)
