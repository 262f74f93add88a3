# ruff: noqa
# fmt: off
"""Tiny random Hugging Face models + their exact outputs: a numeric oracle for a re-implementation.

    python make_golden.py [--out DIR] [--only name ...] [--no-mutations]

For every case this writes  <out>/<name>/
    config.json        as written by transformers 5 `save_pretrained` (new style: rope_parameters, dtype, ...)
    config_hub.json    same model, written the way Hub checkpoints of 2019-2025 are (rope_theta, rope_scaling, ...)
    generation_config.json, model.safetensors (Hub tensor names: unfused experts, block_sparse_moe, ...)
    expected.npz       inputs and expected outputs (see README.md)
    meta.json          class, seed, noise level, margins, mutation sensitivities
Everything is float32, eager attention, eager experts, CPU, 1 thread.
"""
import argparse, copy, hashlib, io, json, logging, math, os, shutil, sys, tempfile, warnings, zipfile, zlib
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import numpy as np
import torch
import transformers
from transformers import AutoConfig
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar()
NEW = 16  # greedy tokens


# --------------------------------------------------------------------------------------------- utilities
def save_npz(path, arrays):
    """np.savez_compressed with fixed time stamps -> byte-reproducible."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for k in sorted(arrays):
            b = io.BytesIO()
            np.lib.format.write_array(b, np.asarray(arrays[k], order="C"), allow_pickle=False)
            zi = zipfile.ZipInfo(k + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
            zi.compress_type = zipfile.ZIP_DEFLATED
            zi.external_attr = 0o644 << 16
            z.writestr(zi, b.getvalue())


def rng_for(*key):
    return np.random.Generator(np.random.PCG64(zlib.crc32("/".join(map(str, key)).encode())))


def dims(cfg):
    d = cfg.hidden_size
    return d


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
    tied = getattr(cfg, "tie_word_embeddings", True)
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
            gain = g["qk"] if qk else (g["down"] if parent in ("down_proj", "wo", "fc2", "o", "o_proj", "c_proj") else g["lin"])
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
    try:
        m.set_experts_implementation("eager")
    except Exception:
        pass
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


class Hooks:
    def __init__(self, m):
        self.out = {}
        self.h = []
        for n, mod in m.named_modules():
            if type(mod).__name__.endswith("Router"):
                self.h.append(mod.register_forward_hook(self._f(n)))

    def _f(self, n):
        def f(mod, a, o):
            self.out[n] = tuple(t.detach() for t in o)
        return f

    def close(self):
        for h in self.h:
            h.remove()


# --------------------------------------------------------------------------------------------- inputs
def make_inputs(name, seed, hub, io_):
    r = rng_for(name, seed, "inputs")
    V = hub["vocab_size"]
    lo, hi = io_.get("ids", (3, V))
    B, T = 2, io_["T"]
    x = dict(input_ids=r.integers(lo, hi, (B, T)))
    kind = io_["kind"]
    pad = hub.get("pad_token_id")
    pad = 0 if pad is None else pad
    if kind == "causal":
        k = io_.get("npad", 7)
        mL = np.ones((B, T), np.int64); mL[1, :k] = 0
        idL = r.integers(lo, hi, (B, T)); idL[mL == 0] = pad
        pos = np.clip(np.cumsum(mL, -1) - 1, 0, None)
        x.update(padL_input_ids=idL, padL_attention_mask=mL, padL_position_ids=pos)
        mR = np.ones((B, T), np.int64); mR[0, T - k - 2:] = 0
        idR = r.integers(lo, hi, (B, T)); idR[mR == 0] = pad
        x.update(padR_input_ids=idR, padR_attention_mask=mR)
    elif kind == "bert":
        x["token_type_ids"] = r.integers(0, hub.get("type_vocab_size", 2), (B, T))
        mR = np.ones((B, T), np.int64); mR[1, T - 9:] = 0
        idR = r.integers(lo, hi, (B, T)); idR[mR == 0] = pad
        x.update(padR_input_ids=idR, padR_attention_mask=mR, padR_token_type_ids=r.integers(0, hub.get("type_vocab_size", 2), (B, T)) * mR)
    elif kind == "seq2seq":
        dlo, dhi = io_.get("dec_ids", (lo, hi))
        lab = r.integers(dlo, dhi, (B, io_["Td"])); lab[1, -4:] = -100
        x["labels"] = lab
        mR = np.ones((B, T), np.int64); mR[1, T - 11:] = 0
        idR = r.integers(lo, hi, (B, T)); idR[mR == 0] = pad
        x.update(padR_input_ids=idR, padR_attention_mask=mR)
    return {k: np.asarray(v, np.int64) for k, v in x.items()}


def t(a):
    return torch.from_numpy(np.asarray(a))


def f32(a):
    return a.detach().to(torch.float32).cpu().numpy()


# --------------------------------------------------------------------------------------------- run
@torch.no_grad()
def fwd_logits(m, kind, x):
    if kind == "causal":
        return m(input_ids=t(x["input_ids"]), use_cache=False).logits
    if kind == "bert":
        return m(input_ids=t(x["input_ids"]), token_type_ids=t(x["token_type_ids"])).prediction_logits
    return m(input_ids=t(x["input_ids"]), decoder_input_ids=t(x["decoder_input_ids"]), use_cache=False).logits


def run(m, kind, x, full=True):
    e = {}
    V = None
    hk = Hooks(m)
    with torch.no_grad():
        if kind == "causal":
            o = m(input_ids=t(x["input_ids"]), output_hidden_states=True, use_cache=False)
            e["logits"] = f32(o.logits)
            e["hidden_states"] = np.stack([f32(h) for h in o.hidden_states])
            routers = hk.out; hk.out = {}
            if routers:
                idx, w, lg = [], [], []
                for n in sorted(routers, key=lambda s: int([p for p in s.split(".") if p.isdigit()][0])):
                    l_, w_, i_ = routers[n]
                    o_ = torch.argsort(i_, dim=-1)
                    idx.append(torch.gather(i_, -1, o_).numpy().astype(np.int64)); w.append(f32(torch.gather(w_, -1, o_))); lg.append(f32(l_))
                B, T = x["input_ids"].shape
                e["moe_layers"] = np.array([int([p for p in s.split(".") if p.isdigit()][0]) for s in sorted(routers, key=lambda s: int([p for p in s.split(".") if p.isdigit()][0]))])
                e["moe_topk_idx"] = np.stack(idx).reshape(len(idx), B, T, -1)
                e["moe_topk_weight"] = np.stack(w).reshape(len(w), B, T, -1)
                e["moe_router_logits"] = np.stack(lg).reshape(len(lg), B, T, -1)
            o = m(input_ids=t(x["padL_input_ids"]), attention_mask=t(x["padL_attention_mask"]),
                  position_ids=t(x["padL_position_ids"]), use_cache=False)
            e["padL_logits"] = f32(o.logits) * x["padL_attention_mask"][..., None].astype(np.float32)
            o = m(input_ids=t(x["padR_input_ids"]), attention_mask=t(x["padR_attention_mask"]), use_cache=False)
            e["padR_logits"] = f32(o.logits) * x["padR_attention_mask"][..., None].astype(np.float32)
            rot = [mod for n, mod in m.named_modules() if type(mod).__name__.endswith("RotaryEmbedding")]
            if rot:
                for bn, b in rot[0].named_buffers():
                    if bn.endswith("inv_freq") and "original" not in bn:
                        e["rope_" + bn] = f32(b)
                for an in dir(rot[0]):
                    if an.endswith("attention_scaling"):
                        e["rope_" + an] = np.float32(getattr(rot[0], an))
        elif kind == "bert":
            kw = dict(input_ids=t(x["input_ids"]), token_type_ids=t(x["token_type_ids"]))
            o = m(output_hidden_states=True, **kw)
            e["logits"] = f32(o.prediction_logits); e["nsp_logits"] = f32(o.seq_relationship_logits)
            e["hidden_states"] = np.stack([f32(h) for h in o.hidden_states])
            e["pooled"] = f32(m.bert(**kw).pooler_output)
            e["logits_no_tt"] = f32(m(input_ids=t(x["input_ids"])).prediction_logits)
            kw = dict(input_ids=t(x["padR_input_ids"]), token_type_ids=t(x["padR_token_type_ids"]), attention_mask=t(x["padR_attention_mask"]))
            o = m(**kw)
            e["padR_logits"] = f32(o.prediction_logits) * x["padR_attention_mask"][..., None].astype(np.float32)
            e["padR_pooled"] = f32(m.bert(**kw).pooler_output)
        else:
            o = m(input_ids=t(x["input_ids"]), decoder_input_ids=t(x["decoder_input_ids"]), output_hidden_states=True, use_cache=False)
            e["logits"] = f32(o.logits)
            e["encoder_hidden_states"] = np.stack([f32(h) for h in o.encoder_hidden_states])
            e["decoder_hidden_states"] = np.stack([f32(h) for h in o.decoder_hidden_states])
            o = m(input_ids=t(x["padR_input_ids"]), attention_mask=t(x["padR_attention_mask"]), decoder_input_ids=t(x["decoder_input_ids"]), use_cache=False)
            e["padR_logits"] = f32(o.logits)
    hk.close()
    if not full:
        return e
    # loss and gradients (mean cross-entropy, labels shifted inside HF for causal LMs)
    if kind in ("causal", "seq2seq"):
        m.zero_grad(set_to_none=True)
        if kind == "causal":
            lab = x["padR_input_ids"].copy(); lab[x["padR_attention_mask"] == 0] = -100
            o = m(input_ids=t(x["padR_input_ids"]), attention_mask=t(x["padR_attention_mask"]), labels=t(lab), use_cache=False)
            e["loss_labels"] = lab
        else:
            o = m(input_ids=t(x["padR_input_ids"]), attention_mask=t(x["padR_attention_mask"]), labels=t(x["labels"]), use_cache=False)
        o.loss.backward()
        e["loss"] = np.float32(o.loss.item())
        ps = [(n, p) for n, p in m.named_parameters() if p.grad is not None and p.requires_grad]
        e["grad_global_norm"] = np.float32(math.sqrt(sum(float(p.grad.double().pow(2).sum()) for _, p in ps)))
        e["grad_embed"] = f32(m.get_input_embeddings().weight.grad)
        m.zero_grad(set_to_none=True)
        if getattr(m.config, "router_aux_loss_coef", None) is not None:
            with torch.no_grad():
                o = m(input_ids=t(x["input_ids"]), output_router_logits=True, use_cache=False)
                if getattr(o, "aux_loss", None) is not None:
                    e["aux_loss"] = np.float32(float(o.aux_loss))
                o = m(input_ids=t(x["padR_input_ids"]), attention_mask=t(x["padR_attention_mask"]), output_router_logits=True, use_cache=False)
                if getattr(o, "aux_loss", None) is not None:
                    e["padR_aux_loss"] = np.float32(float(o.aux_loss))
        # greedy
        kw = dict(max_new_tokens=NEW, do_sample=False, num_beams=1, output_logits=True, return_dict_in_generate=True)
        L = x["input_ids"].shape[1] if kind == "causal" else 1
        with torch.no_grad():
            base = dict(input_ids=t(x["input_ids"]), attention_mask=torch.ones_like(t(x["input_ids"])))
            a = m.generate(**base, use_cache=True, **kw)
            b = m.generate(**base, use_cache=False, **kw)
            sa, sb = a.sequences[:, L:].numpy(), b.sequences[:, L:].numpy()
            e["_gen_agree"] = bool((sa == sb).all())
            e["gen_tokens"] = sa.astype(np.int64)
            e["gen_logits"] = np.stack([f32(l) for l in b.logits], 1)
            e["_gen_cache_diff"] = float(np.abs(np.stack([f32(l) for l in a.logits], 1) - e["gen_logits"]).max())
            srt = np.sort(e["gen_logits"], -1)
            e["_gen_margin"] = float((srt[..., -1] - srt[..., -2]).min())
            pk = "padL" if kind == "causal" else "padR"
            base = dict(input_ids=t(x[pk + "_input_ids"]), attention_mask=t(x[pk + "_attention_mask"]))
            a = m.generate(**base, use_cache=True, **kw)
            b = m.generate(**base, use_cache=False, **kw)
            sa, sb = a.sequences[:, L:].numpy(), b.sequences[:, L:].numpy()
            e["_gen_agree"] &= bool((sa == sb).all())
            e[pk + "_gen_tokens"] = sa.astype(np.int64)
            lg = np.stack([f32(l) for l in b.logits], 1)
            srt = np.sort(lg, -1)
            e["_gen_margin"] = min(e["_gen_margin"], float((srt[..., -1] - srt[..., -2]).min()))
            e["_gen_unique"] = int(min(len(set(row.tolist())) for row in np.concatenate([e["gen_tokens"], e[pk + "_gen_tokens"]])))
    return e


def perturb_sens(m, kind, x, ref, seed):
    """max |dlogits| when every weight is multiplied by 1 + 1e-6 N(0,1): shows near-ties in routers."""
    worst = 0.0
    sd = {n: p.detach().clone() for n, p in m.named_parameters()}
    for k in range(3):
        g = torch.Generator().manual_seed(1000 + k)
        with torch.no_grad():
            for n, p in m.named_parameters():
                p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=g))
        worst = max(worst, float(np.abs(f32(fwd_logits(m, kind, x)) - ref).max()))
        e = run(m, kind, x, full=False)
        with torch.no_grad():
            for n, p in m.named_parameters():
                p.copy_(sd[n])
        for q in ("padL_logits", "padR_logits"):
            if q in e and q in x.get("_ref", {}):
                worst = max(worst, float(np.abs(e[q] - x["_ref"][q]).max()))
    return worst


def check(e, meta, gu=3):
    bad = []
    for k, v in e.items():
        if isinstance(v, np.ndarray) and v.dtype.kind == "f" and not np.isfinite(v).all():
            bad.append("nonfinite " + k)
    lg = e["logits"]
    meta["logit_std"] = float(lg.std()); meta["logit_absmax"] = float(np.abs(lg).max())
    meta["argmax_unique"] = int(len(np.unique(lg.argmax(-1))))
    if not (0.5 < lg.std() < 12): bad.append(f"logit std {lg.std():.2f}")
    if meta["argmax_unique"] < 12: bad.append(f"argmax unique {meta['argmax_unique']}")
    if "gen_tokens" in e:
        if not e["_gen_agree"]: bad.append("cached/uncached greedy differ")
        if e["_gen_margin"] < 1e-2: bad.append(f"greedy margin {e['_gen_margin']:.1e}")
        if e["_gen_unique"] < gu: bad.append("greedy is constant")
        meta.update(gen_margin=e["_gen_margin"], gen_cache_vs_nocache=e["_gen_cache_diff"], gen_unique_min=e["_gen_unique"])
    return bad


def prescreen(m, kind, x, gu=3):
    """Cheap rejection of degenerate draws (same token everywhere) before the full procedure."""
    lg = fwd_logits(m, kind, x)
    if len(np.unique(lg.argmax(-1).numpy())) < 12 or not 0.5 < float(lg.std()) < 12:
        return False
    if kind == "bert":
        return True
    clean_gen(m)
    gc = copy.deepcopy(m.generation_config)
    L = x["input_ids"].shape[1] if kind == "causal" else 1
    with torch.no_grad():
        g = m.generate(input_ids=t(x["input_ids"]), attention_mask=torch.ones_like(t(x["input_ids"])), max_new_tokens=NEW, do_sample=False, num_beams=1)[:, L:].numpy()
    m.generation_config = gc
    return min(len(set(r.tolist())) for r in g) >= gu


def tree_sha(d):
    h = {}
    for f in sorted(os.listdir(d)):
        h[f] = hashlib.sha256(open(os.path.join(d, f), "rb").read()).hexdigest()[:16]
    return h


def make_case(name, case, out, mutations=True, verbose=True):
    hub, io_, gains = case["hub"], case["io"], case.get("gains")
    kind = io_["kind"]
    hub = dict(hub)
    cls = getattr(transformers, hub["architectures"][0])
    d = os.path.join(out, name)
    first = case.get("seed", 0)
    bad = []
    for seed in range(first, first + 1000):
        m = build(hub, case.get("untie_lm_head", False))
        init_model(m, name, seed, gains)
        if "post_init" in case:
            m = case["post_init"](m, name, seed) or m
        x = make_inputs(name, seed, hub, io_)
        if kind == "seq2seq":
            x["decoder_input_ids"] = m.prepare_decoder_input_ids_from_labels(t(x["labels"])).numpy()
        if not prescreen(m, kind, x, io_.get('gu', 3)):
            continue
        shutil.rmtree(d, ignore_errors=True); os.makedirs(d)
        pre = f32(fwd_logits(m, kind, x))
        if "save" in case:
            case["save"](m, d)
        else:
            m.save_pretrained(d)
            if case.get("untie_lm_head"):
                sd = load_file(os.path.join(d, "model.safetensors"))
                sd["lm_head.weight"] = m.lm_head.weight.detach().clone()
                save_file(sd, os.path.join(d, "model.safetensors"), metadata={"format": "pt"})
        with open(os.path.join(d, "config_hub.json"), "w") as f:
            json.dump(hub, f, indent=2, sort_keys=True); f.write("\n")
        if "load" in case:
            m2 = case["load"](d, cls)
        else:
            m2 = load(d, cls)
        clean_gen(m2)
        e = run(m2, kind, x)
        meta = dict(name=name, architecture=hub["architectures"][0], kind=kind, seed=seed,
                    transformers=transformers.__version__, torch=torch.__version__)
        meta["reload_diff"] = float(np.abs(pre - e["logits"]).max())
        bad = check(e, meta, io_.get('gu', 3))
        if meta["reload_diff"] > 1e-5: bad.append(f"reload differs {meta['reload_diff']}")
        # Hub-style config must give the same model
        with tempfile.TemporaryDirectory() as td:
            shutil.copy(os.path.join(d, "model.safetensors"), td)
            shutil.copy(os.path.join(d, "config_hub.json"), os.path.join(td, "config.json"))
            m3 = case["load"](td, cls) if "load" in case else load(td, cls)
            meta["hub_config_diff"] = float(np.abs(f32(fwd_logits(m3, kind, x)) - e["logits"]).max())
        if meta["hub_config_diff"] > 0: bad.append(f"hub config differs {meta['hub_config_diff']}")
        # noise level: the same model in float64
        with torch.no_grad():
            m64 = copy.deepcopy(m2).double()
            lg64 = fwd_logits(m64, kind, x).float().numpy()
        meta["fp64_diff"] = float(np.abs(lg64 - e["logits"]).max())
        x["_ref"] = {k: e[k] for k in ("padL_logits", "padR_logits") if k in e}
        meta["sens_1e-6"] = perturb_sens(m2, kind, x, e["logits"], seed)
        x.pop("_ref")
        if meta["fp64_diff"] > 1e-3: bad.append(f"fp64 diff {meta['fp64_diff']:.1e}")
        if meta["sens_1e-6"] > 1e-3: bad.append(f"sens {meta['sens_1e-6']:.1e}")
        if "extra" in case:
            e.update(case["extra"](m2, x, meta, bad, d))
        if not bad:
            break
        if verbose:
            print(f"  {name} seed {seed}: {bad}", flush=True)
    else:
        raise SystemExit(f"{name}: no good seed: {bad}")
    arrays = {k: v for k, v in x.items()}
    arrays.update({k: v for k, v in e.items() if not k.startswith("_")})
    save_npz(os.path.join(d, "expected.npz"), arrays)
    # mutations: how much do the logits move if one detail is implemented differently?
    if mutations:
        meta["mutations"] = {}
        for mn, fn in case.get("mut", {}).items():
            cfg = cls.config_class.from_pretrained(d)
            try:
                r = fn(cfg)
                mm = case["load"](d, cls, r or cfg) if "load" in case else load(d, cls, r or cfg)
                with torch.no_grad():
                    lg = f32(fwd_logits(mm, kind, x))
                meta["mutations"][mn] = float(np.abs(lg - e["logits"]).max())
            except Exception as ex:  # noqa
                meta["mutations"][mn] = f"error {type(ex).__name__}: {str(ex)[:80]}"
    n = sum(p.numel() for p in m2.parameters())
    meta["params"] = n
    with open(os.path.join(d, "meta.json"), "w") as f:
        json.dump(meta, f, indent=1, sort_keys=True); f.write("\n")
    for fn in os.listdir(d):
        os.chmod(os.path.join(d, fn), 0o644)
    return meta


# --------------------------------------------------------------------------------------------- mutations
def setc(**kw):
    def f(cfg):
        for k, v in kw.items():
            setattr(cfg, k, v)
    return f


def rope(**kw):
    def f(cfg):
        rp = dict(cfg.rope_parameters)
        for k, v in kw.items():
            if v is None: rp.pop(k, None)
            else: rp[k] = v
        cfg.rope_parameters = rp
    return f


def rope_default(cfg):
    cfg.rope_parameters = {"rope_type": "default", "rope_theta": cfg.rope_parameters["rope_theta"]}


def rope_lt(lt, **kw):
    def f(cfg):
        rp = copy.deepcopy(cfg.rope_parameters); rp[lt].update(kw); cfg.rope_parameters = rp
    return f


def swap_types(cfg):
    cfg.layer_types = [{"sliding_attention": "full_attention", "full_attention": "sliding_attention"}[q] for q in cfg.layer_types]


def W(w):
    return {"window-1": setc(sliding_window=w - 1), "window+1": setc(sliding_window=w + 1), "window=full": setc(sliding_window=1000)}


# --------------------------------------------------------------------------------------------- golden cases
CAUSAL = dict(kind="causal", T=32)
TIED = dict(emb=0.45, lin=1.6, down=2.5)   # tied embedding: logits = emb . unit-rms vector
COMMON = dict(torch_dtype="float32", initializer_range=0.02, use_cache=True)


def llama_like(arch, mt, **kw):
    h = dict(architectures=[arch], model_type=mt, vocab_size=160, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=128, rms_norm_eps=1e-5,
             rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False, attention_dropout=0.0,
             bos_token_id=1, eos_token_id=2, **COMMON)
    h.update(kw)
    return h


def gemma3_hub(**kw):
    h = llama_like("Gemma3ForCausalLM", "gemma3_text", hidden_size=32, intermediate_size=48, num_hidden_layers=8, head_dim=12,
                   hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, rope_theta=1000000, rope_local_base_freq=10000,
                   rms_norm_eps=1e-6, sliding_window=8, sliding_window_pattern=6, final_logit_softcapping=None, attn_logit_softcapping=None,
                   attention_bias=False, pad_token_id=0, eos_token_id=1, bos_token_id=2, cache_implementation="hybrid")
    h.pop("tie_word_embeddings"); h.pop("hidden_act")
    h.update(kw)
    return h


def deepseek_hub(arch, mt, **kw):
    h = llama_like(arch, mt, hidden_size=32, intermediate_size=48, moe_intermediate_size=12, num_attention_heads=4, num_key_value_heads=4,
                   q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=16,
                   n_shared_experts=1, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
                   first_k_dense_replace=1, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", attention_bias=False,
                   max_position_embeddings=5120, rms_norm_eps=1e-6, rope_theta=10000, bos_token_id=0, eos_token_id=1, num_nextn_predict_layers=0,
                   rope_scaling=dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                                     original_max_position_embeddings=128))
    h.update(kw)
    return h


def gpt_oss_hub(**kw):
    h = llama_like("GptOssForCausalLM", "gpt_oss", hidden_size=32, intermediate_size=24, num_hidden_layers=4, head_dim=16,
                   num_local_experts=6, num_experts_per_tok=3, experts_per_token=3, sliding_window=8, swiglu_limit=7.0, attention_bias=True,
                   layer_types=["sliding_attention", "full_attention"] * 2, rope_theta=150000, router_aux_loss_coef=0.9,
                   output_router_logits=False, max_position_embeddings=2048, initial_context_length=64, eos_token_id=2, pad_token_id=0,
                   rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64, truncate=False))
    h.pop("bos_token_id")
    h.update(kw)
    return h


def clamp_extra(m, x, meta, bad, d):
    """gpt-oss: what share of the gate/up pre-activations hits the clamp, and what if there were no clamp?"""
    lim = m.config.swiglu_limit
    st = []
    orig = type(m.model.layers[0].mlp.experts)._apply_gate
    def spy(self, gu):
        g, u = gu[..., ::2], gu[..., 1::2]
        st.append(torch.stack([(g > lim).float().mean(), (u.abs() > lim).float().mean()]))
        return orig(self, gu)
    type(m.model.layers[0].mlp.experts)._apply_gate = spy
    fwd_logits(m, "causal", x)
    type(m.model.layers[0].mlp.experts)._apply_gate = orig
    s = torch.stack(st).mean(0)
    meta["clamped_gate_up_share"] = [float(s[0]), float(s[1])]
    if s.min() < 0.002: bad.append(f"clamp barely used {s}")
    return {}


def bf16_embed_extra(m, x, meta, bad, d):
    """Gemma: first hidden state of the bfloat16 model = bf16(bf16(emb) * bf16(sqrt(d)))."""
    mb = copy.deepcopy(m).to(torch.bfloat16)
    with torch.no_grad():
        return {"hidden0_bf16": f32(mb.model.embed_tokens(t(x["input_ids"])))}


def attn_probe(model_type):
    pass


GOLDEN = {}
GOLDEN["gpt2"] = dict(
    hub=dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=160, n_positions=64, n_ctx=64, n_embd=40, n_layer=3, n_head=4,
             activation_function="gelu_new", layer_norm_epsilon=1e-5, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, bos_token_id=0, eos_token_id=0,
             initializer_range=0.02, summary_type="cls_index", summary_use_proj=True),
    io=dict(kind="causal", T=40), gains=dict(emb=0.45, lin=2.0, down=3.0),
    mut={"gelu exact": setc(activation_function="gelu"), "eps 1e-6": setc(layer_norm_epsilon=1e-6), "no attn scale": setc(scale_attn_weights=False)})
GOLDEN["gpt_neo_local"] = dict(
    hub=dict(architectures=["GPTNeoForCausalLM"], model_type="gpt_neo", vocab_size=160, max_position_embeddings=64, hidden_size=40, num_layers=4, num_heads=4,
             intermediate_size=80, attention_types=[[["global", "local"], 2]], attention_layers=["global", "local", "global", "local"], window_size=6,
             activation_function="gelu_new", layer_norm_epsilon=1e-5, bos_token_id=0, eos_token_id=0),
    io=dict(kind="causal", T=40), gains=dict(emb=0.45, lin=2.0, down=2.5),
    mut={"window-1": setc(window_size=5), "window+1": setc(window_size=7), "gelu exact": setc(activation_function="gelu")})
GOLDEN["bert"] = dict(
    hub=dict(architectures=["BertForPreTraining"], model_type="bert", vocab_size=160, hidden_size=40, num_hidden_layers=3, num_attention_heads=4,
             intermediate_size=96, hidden_act="gelu", max_position_embeddings=64, type_vocab_size=2, layer_norm_eps=1e-12, pad_token_id=0,
             hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, initializer_range=0.02, position_embedding_type="absolute"),
    io=dict(kind="bert", T=40), gains=dict(emb=0.7, qk=2.0, norm=0.15, bias=0.15),
    mut={"gelu tanh": setc(hidden_act="gelu_new"), "relu": setc(hidden_act="relu"), "eps 1e-5": setc(layer_norm_eps=1e-5)})
T5 = dict(architectures=["T5ForConditionalGeneration"], model_type="t5", vocab_size=150, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=3, num_heads=4,
          relative_attention_num_buckets=32, dropout_rate=0.1, layer_norm_epsilon=1e-6, feed_forward_proj="relu",
          is_encoder_decoder=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, initializer_factor=1.0)
GOLDEN["t5"] = dict(hub=dict(T5), io=dict(kind="seq2seq", T=44, Td=28), gains=dict(emb=2.5, down=4.0, lin=2.2, qk=2.0, norm=0.15),
                    mut={"max_distance 64": setc(relative_attention_max_distance=64), "buckets 16": None, "gelu": setc(dense_act_fn="gelu_new"),
                         "no tied scale": setc(scale_decoder_outputs=False), "eps 1e-5": setc(layer_norm_epsilon=1e-5)})
GOLDEN["t5"]["mut"].pop("buckets 16")
GOLDEN["t5_v1_1"] = dict(hub=dict(T5, d_kv=12, d_ff=56, num_layers=3, num_decoder_layers=2, feed_forward_proj="gated-gelu", tie_word_embeddings=False, relative_attention_max_distance=128),
                         untie_lm_head=True, io=dict(kind="seq2seq", T=44, Td=28), gains=dict(emb=1.0, down=3.0, lin=1.6, head=2.5),
                         mut={"gelu exact": setc(dense_act_fn="gelu"), "tied scale": setc(scale_decoder_outputs=True), "max_distance 64": setc(relative_attention_max_distance=64)})
GOLDEN["marian"] = dict(
    hub=dict(architectures=["MarianMTModel"], model_type="marian", vocab_size=140, decoder_vocab_size=140, d_model=32, encoder_layers=2, decoder_layers=2,
             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, activation_function="relu", dropout=0.1,
             attention_dropout=0.0, activation_dropout=0.0, max_position_embeddings=64, scale_embedding=True, static_position_embeddings=True,
             normalize_before=False, normalize_embedding=False, add_final_layer_norm=False, add_bias_logits=False, share_encoder_decoder_embeddings=True,
             is_encoder_decoder=True, pad_token_id=139, eos_token_id=0, bos_token_id=0, decoder_start_token_id=139, forced_eos_token_id=0, init_std=0.02),
    io=dict(kind="seq2seq", T=40, Td=26, ids=(1, 139), gu=2), gains=dict(emb=0.4, down=1.2, qk=2.0, lin=1.3, aout=0.6, norm=0.12, bias=0.1, flb=0.3),
    mut={"no emb scale": setc(scale_embedding=False), "gelu": setc(activation_function="gelu")})
GOLDEN["llama2"] = dict(hub=llama_like("LlamaForCausalLM", "llama", num_key_value_heads=4, rms_norm_eps=1e-6, pretraining_tp=1, attention_bias=False, mlp_bias=False),
                        io=CAUSAL, mut={"theta 5e5": rope(rope_theta=5e5), "eps 1e-5": setc(rms_norm_eps=1e-5)})
GOLDEN["llama3"] = dict(
    hub=llama_like("LlamaForCausalLM", "llama", rope_theta=500000.0, max_position_embeddings=512, attention_bias=False, mlp_bias=False, pretraining_tp=1,
                   rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64, rope_type="llama3")),
    io=dict(kind="causal", T=48),
    mut={"no rope scaling": rope_default, "factor 4": rope(factor=4.0), "high_freq 2": rope(high_freq_factor=2.0), "theta 1e4": rope(rope_theta=1e4)})
GOLDEN["mistral"] = dict(hub=llama_like("MistralForCausalLM", "mistral", sliding_window=8), io=CAUSAL, mut=W(8))
GOLDEN["olmo2"] = dict(hub=llama_like("Olmo2ForCausalLM", "olmo2", rope_theta=500000.0, rms_norm_eps=1e-6, attention_bias=False), io=CAUSAL, mut={"theta 1e4": rope(rope_theta=1e4), "eps 1e-5": setc(rms_norm_eps=1e-5)})
GOLDEN["qwen2"] = dict(hub=llama_like("Qwen2ForCausalLM", "qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6, sliding_window=32768, use_sliding_window=False, max_window_layers=3,
                                      tie_word_embeddings=True), io=CAUSAL, gains=TIED, mut={"theta 1e4": rope(rope_theta=1e4)})
MIX = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_experts_per_tok=2, rope_theta=1e6, sliding_window=None, output_router_logits=False, router_aux_loss_coef=0.02)
GOLDEN["mixtral_4e"] = dict(hub=llama_like("MixtralForCausalLM", "mixtral", num_local_experts=4, **MIX), io=CAUSAL, mut={"top1": setc(num_experts_per_tok=1), "top3": setc(num_experts_per_tok=3)})
GOLDEN["mixtral_8e"] = dict(hub=llama_like("MixtralForCausalLM", "mixtral", num_local_experts=8, **dict(MIX, intermediate_size=36)), io=dict(kind="causal", T=40), mut={"top1": setc(num_experts_per_tok=1), "theta 1e4": rope(rope_theta=1e4)})
GMUT = dict(W(8), **{"query scale=head_dim": setc(query_pre_attn_scalar=12), "swap layer types": swap_types, "one theta (local=global)": rope_lt("sliding_attention", rope_theta=1e6),
                     "one theta (global=local)": rope_lt("full_attention", rope_theta=1e4), "gelu exact": setc(hidden_activation="gelu"), "eps 1e-5": setc(rms_norm_eps=1e-5)})
GOLDEN["gemma3"] = dict(hub=gemma3_hub(), io=CAUSAL, gains=dict(emb=0.22, qk=1.3), mut=GMUT, extra=bf16_embed_extra)
GOLDEN["gemma3_linear"] = dict(hub=gemma3_hub(rope_scaling=dict(factor=8.0, rope_type="linear")), io=CAUSAL, gains=dict(emb=0.22, qk=1.3),
                               mut=dict(GMUT, **{"no linear scaling": rope_lt("full_attention", factor=1.0),
                                                 "scaling on local too": rope_lt("sliding_attention", rope_type="linear", factor=8.0)}), extra=bf16_embed_extra)
GOLDEN["gemma2"] = dict(
    hub=(lambda h: (h.pop("sliding_window_pattern"), h.pop("rope_local_base_freq"), h)[-1])(
        gemma3_hub(architectures=["Gemma2ForCausalLM"], model_type="gemma2", num_hidden_layers=4, rope_theta=10000.0, attn_logit_softcapping=8.0, final_logit_softcapping=6.0,
                   hidden_act="gelu_pytorch_tanh", intermediate_size=64)),
    io=CAUSAL, gains=dict(emb=0.25, qk=2.2),
    mut=dict(W(8), **{"no attn softcap": setc(attn_logit_softcapping=None), "no final softcap": setc(final_logit_softcapping=None), "query scale=head_dim": setc(query_pre_attn_scalar=12), "swap layer types": swap_types}),
    extra=bf16_embed_extra)
Q3 = dict(head_dim=16, rope_theta=1000000, rms_norm_eps=1e-6, attention_bias=False, sliding_window=None, use_sliding_window=False, max_window_layers=3)
GOLDEN["qwen3"] = dict(hub=llama_like("Qwen3ForCausalLM", "qwen3", **Q3), io=CAUSAL, mut={"theta 1e4": rope(rope_theta=1e4), "eps 1e-5": setc(rms_norm_eps=1e-5)})
GOLDEN["qwen3_yarn"] = dict(hub=llama_like("Qwen3ForCausalLM", "qwen3", **dict(Q3, max_position_embeddings=2048, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512))), io=dict(kind="causal", T=48),
                            mut={"no yarn": rope_default, "attention_factor 1": rope(attention_factor=1.0), "truncate false": rope(truncate=False), "factor 2": rope(factor=2.0), "beta_fast 4": rope(beta_fast=4.0)})
QM = dict(Q3, hidden_size=32, moe_intermediate_size=24, intermediate_size=56, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False, router_aux_loss_coef=0.001)
GOLDEN["qwen3_moe"] = dict(hub=llama_like("Qwen3MoeForCausalLM", "qwen3_moe", **QM), io=CAUSAL, mut={"no norm_topk": setc(norm_topk_prob=False), "top3": setc(num_experts_per_tok=3)})
GOLDEN["qwen3_moe_sparse"] = dict(hub=llama_like("Qwen3MoeForCausalLM", "qwen3_moe", **dict(QM, num_hidden_layers=6, head_dim=10, num_experts=6, moe_intermediate_size=16, intermediate_size=40, num_experts_per_tok=3, decoder_sparse_step=2, mlp_only_layers=[3])),
                                  io=CAUSAL, mut={"no norm_topk": setc(norm_topk_prob=False)})
DMUT = {"rope not interleaved": setc(rope_interleave=False), "n_group 1": setc(n_group=1, topk_group=1), "topk_group 1": setc(topk_group=1), "no norm_topk": setc(norm_topk_prob=False),
        "routed_scaling 1": setc(routed_scaling_factor=1.0), "no yarn": rope_default, "mscale_all_dim dropped": rope(mscale_all_dim=None), "mscale dropped": rope(mscale=None),
        "truncate false": rope(truncate=False), "theta 1e5": rope(rope_theta=1e5)}
GOLDEN["deepseek_v3"] = dict(hub=deepseek_hub("DeepseekV3ForCausalLM", "deepseek_v3"), io=CAUSAL, gains=dict(router=2.5), mut=DMUT)
GOLDEN["deepseek_v3_noqlora"] = dict(hub=deepseek_hub("DeepseekV3ForCausalLM", "deepseek_v3", q_lora_rank=None, qk_rope_head_dim=12,
                                                      rope_scaling=dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=128)),
                                     io=CAUSAL, gains=dict(router=2.5), mut=dict(DMUT, **{"attention_factor 1": rope(attention_factor=1.0)}))
GOLDEN["deepseek_v2"] = dict(hub=deepseek_hub("DeepseekV2ForCausalLM", "deepseek_v2", q_lora_rank=None, n_routed_experts=8, moe_intermediate_size=16, n_shared_experts=2, num_experts_per_tok=3, n_group=1, topk_group=1,
                                              norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax", topk_method="greedy", aux_loss_alpha=0.001, seq_aux=True,
                                              rope_scaling=dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=128)),
                             io=CAUSAL, mut={"no yarn": rope_default, "mscale_all_dim dropped": rope(mscale_all_dim=None), "routed_scaling 2": setc(routed_scaling_factor=2.0), "top2": setc(num_experts_per_tok=2)})
OMUT = dict(W(8), **{"swap layer types": swap_types, "no clamp": setc(swiglu_limit=1e9), "alpha 1 (silu)": setc(swiglu_alpha=1.0), "truncate true": rope(truncate=True), "no yarn": rope_default,
                     "attention_factor 1": rope(attention_factor=1.0), "top2": setc(num_experts_per_tok=2)})
GOLDEN["gpt_oss"] = dict(hub=gpt_oss_hub(), io=CAUSAL, gains=dict(gate_up=4.5, down=0.6, router=2.0, bias=0.4), mut=OMUT, extra=clamp_extra)


# ------------------------------------------------------------------ quantised checkpoints (weights only, maths in float32)
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
        save_file({k: v.contiguous() for k, v in sd.items()}, os.path.join(td, "model.safetensors"), metadata={"format": "pt"})
        cfg.save_pretrained(td)
        return load(td, cls)


def add_quant_cfg(d, qc):
    p = os.path.join(d, "config.json")
    c = json.load(open(p)); c["quantization_config"] = qc
    json.dump(c, open(p, "w"), indent=2, sort_keys=True)


def mx_encode(sd):
    out = {}
    for k, v in sd.items():
        if k.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            out[k + "_blocks"], out[k + "_scales"] = mxfp4_pack(v.transpose(1, 2))   # [E, K, N] -> [E, N, K]
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
        if k.endswith("proj.weight") or k.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            o, i = v.shape
            O, I = -(-o // FP8_BS), -(-i // FP8_BS)
            p = torch.zeros(O * FP8_BS, I * FP8_BS); p[:o, :i] = v
            b = p.view(O, FP8_BS, I, FP8_BS)
            sc = b.abs().amax((1, 3)) / 448.0
            q = (b / sc[:, None, :, None]).to(torch.float8_e4m3fn).view(O * FP8_BS, I * FP8_BS)[:o, :i].contiguous()
            out[k] = q; out[k + "_scale_inv"] = sc.float()
        else:
            out[k] = v
    return out


def fp8_decode(sd):
    out = {}
    for k, v in sd.items():
        if k.endswith("_scale_inv"):
            continue
        if k + "_scale_inv" in sd:
            s_ = sd[k + "_scale_inv"].repeat_interleave(FP8_BS, 0).repeat_interleave(FP8_BS, 1)[: v.shape[0], : v.shape[1]]
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
        save_file({k: v.contiguous() for k, v in sd.items()}, os.path.join(d, "model.safetensors"), metadata={"format": "pt"})
        add_quant_cfg(d, qc)

    def ld(d, cls, config=None):
        return dense_load(d, cls, dec(load_file(os.path.join(d, "model.safetensors"))), config)
    return dict(post_init=post_init, save=save, load=ld)


MXQ = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"])
F8Q = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[FP8_BS, FP8_BS])
GOLDEN["gpt_oss_mxfp4"] = dict(hub=gpt_oss_hub(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, experts_per_token=2, num_hidden_layers=2,
                                               layer_types=["sliding_attention", "full_attention"], quantization_config=MXQ),
                               io=CAUSAL, gains=dict(gate_up=4.5, down=0.8, router=2.0, bias=0.4), mut={"no clamp": setc(swiglu_limit=1e9)}, **quant_case(mx_encode, mx_decode, MXQ))
GOLDEN["deepseek_v3_fp8"] = dict(hub=deepseek_hub("DeepseekV3ForCausalLM", "deepseek_v3", num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, v_head_dim=8, quantization_config=F8Q),
                                 io=CAUSAL, gains=dict(router=2.5), mut={"n_group 1": setc(n_group=1, topk_group=1)}, **quant_case(fp8_encode, fp8_decode, F8Q))


def table(metas, out):
    hdr = f"{'case':22s} {'params':>7s} {'safet.KB':>8s} {'npzKB':>6s} {'seed':>4s} {'std':>5s} {'uniq':>4s} {'fp64diff':>8s} {'sens1e-6':>8s} {'gen_margin':>10s} {'cache-nocache':>13s}"
    print(hdr)
    for m in metas:
        d = os.path.join(out, m["name"])
        sz = lambda f: os.path.getsize(os.path.join(d, f)) / 1024
        print(f"{m['name']:22s} {m['params']:7d} {sz('model.safetensors'):8.0f} {sz('expected.npz'):6.0f} {m['seed']:4d} {m['logit_std']:5.2f} {m['argmax_unique']:4d} {m['fp64_diff']:8.1e} {m['sens_1e-6']:8.1e} "
              f"{m.get('gen_margin', float('nan')):10.3f} {m.get('gen_cache_vs_nocache', float('nan')):13.1e}")


def main(cases, default_out, seeds_file):
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=default_out)
    ap.add_argument("--only", nargs="*")
    ap.add_argument("--no-mutations", action="store_true")
    ap.add_argument("--search", action="store_true", help="search seeds again instead of starting from the recorded ones")
    a = ap.parse_args()
    metas = []
    seeds = {} if a.search or not os.path.exists(seeds_file) else json.load(open(seeds_file))
    for n, c in cases.items():
        if a.only and n not in a.only:
            continue
        metas.append(make_case(n, dict(c, seed=seeds.get(n, c.get("seed", 0))), a.out, not a.no_mutations))
        seeds[n] = metas[-1]["seed"]
        print("done", n, {k: (v if isinstance(v, str) else round(v, 4)) for k, v in metas[-1].get("mutations", {}).items()}, flush=True)
    table(metas, a.out)
    json.dump(seeds, open(seeds_file, "w"), indent=0, sort_keys=True)


HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    main(GOLDEN, HERE, os.path.join(HERE, "seeds.json"))
