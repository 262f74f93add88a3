"""Tiny random models: built from a config as the Hub spells it, with parameters by their names."""

import contextlib
import copy
import math
import zlib

import numpy as np
import torch
import transformers


def rng_for(*key):
    return np.random.Generator(np.random.PCG64(zlib.crc32("/".join(map(str, key)).encode())))


NORM_KEYS = ("norm", "LayerNorm", "ln_1", "ln_2", "ln_f")


def init_model(model, name, seed, gains):
    """Deterministic re-init, by parameter name and in sorted name order (torch's RNG is not used)."""
    cfg = model.config
    g = dict(lin=1.2, qk=1.3, emb=0.7, head=2.5, router=2.0, gate_up=1.3, down=1.5, norm=0.25, bias=0.25)
    g.update(gains or {})
    gemma = cfg.model_type.startswith("gemma")
    d = cfg.hidden_size
    items = dict(model.named_parameters())
    for n, b in model.named_buffers():
        if n.endswith(("e_score_correction_bias", "final_logits_bias")):
            items[n] = b
    for n in sorted(items):
        p = items[n]
        if "embed_positions" in n and cfg.model_type == "marian":
            continue  # sinusoids, computed
        r = rng_for(name, seed, n)
        x = r.standard_normal(tuple(p.shape))
        leaf = n.split(".")[-1]
        parent = n.split(".")[-2] if "." in n else ""
        if any(k in parent for k in NORM_KEYS) or any(k in n.split(".")[-2:][0] for k in NORM_KEYS):
            if leaf == "bias":
                x = x * g["norm"]
            else:
                x = x * g["norm"] + (0.0 if gemma else 1.0)
        elif leaf == "sinks":
            x = x * 1.0 + 0.5
        elif leaf == "e_score_correction_bias":
            x = x * 0.15
        elif leaf == "final_logits_bias":
            x = x * g.get("flb", 0.7)
        elif leaf in ("bias", "gate_up_proj_bias", "down_proj_bias") or leaf.endswith("_bias"):
            x = x * g["bias"]
        elif parent == "relative_attention_bias":
            x = x * 1.0
        elif parent in ("embed_tokens", "wte", "shared", "word_embeddings"):
            x = x * g["emb"]
        elif parent in ("wpe", "position_embeddings", "token_type_embeddings"):
            x = x * g["emb"] * 0.7
        elif parent == "lm_head":
            x = x * g["head"] / math.sqrt(d)
        elif parent in ("gate", "router") and leaf == "weight":
            x = x * g["router"] / math.sqrt(d)
        elif leaf == "gate_up_proj":  # fused experts; fan-in is the hidden size in every layout
            x = x * g["gate_up"] / math.sqrt(d)
        elif leaf == "down_proj" and x.ndim == 3:
            fan = x.shape[1] if cfg.model_type == "gpt_oss" else x.shape[2]
            x = x * g["down"] / math.sqrt(fan)
        elif x.ndim == 2:
            fan = x.shape[0] if cfg.model_type == "gpt2" else x.shape[1]
            qk = parent in ("q_proj", "k_proj", "query", "key", "q", "k", "q_b_proj", "kv_b_proj")
            gain = (
                g["qk"]
                if qk
                else (g["down"] if parent in ("down_proj", "wo", "fc2", "o", "o_proj", "c_proj") else g["lin"])
            )
            if cfg.model_type == "t5" and parent == "q":
                gain = gain / math.sqrt(cfg.d_kv)
            if cfg.model_type == "gpt_neo" and parent == "q_proj":
                gain = gain / math.sqrt(d // cfg.num_heads)
            if parent == "out_proj":
                gain = g.get("aout", gain)
            x = x * gain / math.sqrt(fan)
        else:
            raise RuntimeError(f"no rule for {n} {tuple(p.shape)}")
        with torch.no_grad():
            p.copy_(torch.from_numpy(x.astype(np.float32)))


def build(hub, untie_lm_head=False):
    cls = getattr(transformers, hub["architectures"][0])
    cfg = cls.config_class.from_dict({k: v for k, v in copy.deepcopy(hub).items() if k != "quantization_config"})
    cfg._attn_implementation = "eager"
    cfg._experts_implementation = "eager"
    m = cls._from_config(cfg, attn_implementation="eager") if hasattr(cls, "_from_config") else cls(cfg)
    with contextlib.suppress(Exception):  # of those that have no experts
        m.set_experts_implementation("eager")
    if untie_lm_head:
        m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.detach().clone())
        m.all_tied_weights_keys = {k: v for k, v in m.all_tied_weights_keys.items() if k != "lm_head.weight"}
    return m.float().eval()


def load(d, cls, config=None):
    kw = dict(attn_implementation="eager", dtype=torch.float32, local_files_only=True)
    if config is not None:
        kw["config"] = config
    try:
        m = cls.from_pretrained(d, experts_implementation="eager", **kw)
    except TypeError:
        m = cls.from_pretrained(d, **kw)
    return m.eval()


def clean_gen(m):
    gc = getattr(m, "generation_config", None)
    if gc is None:
        return m
    gc.eos_token_id = None
    gc.forced_eos_token_id = None
    gc.bad_words_ids = None
    if gc.pad_token_id is None:
        gc.pad_token_id = 0
    return m
