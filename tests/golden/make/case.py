"""One case: a seed whose draw is nowhere degenerate, its files, and how much wrong details would move the logits."""

import copy
import io
import json
import os
import shutil
import tempfile
import zipfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.golden.make.outputs import NEW, f32, fwd_logits, make_inputs, run, t
from tests.golden.make.weights import build, clean_gen, init_model, load


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


def perturb_sens(m, kind, x, ref, seed):
    """max |dlogits| when every weight is multiplied by 1 + 1e-6 N(0,1): shows near-ties in routers."""
    worst = 0.0
    sd = {n: p.detach().clone() for n, p in m.named_parameters()}
    for k in range(3):
        g = torch.Generator().manual_seed(1000 + k)
        with torch.no_grad():
            for p in m.parameters():
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
    meta["logit_std"] = float(lg.std())
    meta["logit_absmax"] = float(np.abs(lg).max())
    meta["argmax_unique"] = len(np.unique(lg.argmax(-1)))
    if not (0.5 < lg.std() < 12):
        bad.append(f"logit std {lg.std():.2f}")
    if meta["argmax_unique"] < 12:
        bad.append(f"argmax unique {meta['argmax_unique']}")
    if "gen_tokens" in e:
        if not e["_gen_agree"]:
            bad.append("cached/uncached greedy differ")
        if e["_gen_margin"] < 1e-2:
            bad.append(f"greedy margin {e['_gen_margin']:.1e}")
        if e["_gen_unique"] < gu:
            bad.append("greedy is constant")
        meta.update(
            gen_margin=e["_gen_margin"], gen_cache_vs_nocache=e["_gen_cache_diff"], gen_unique_min=e["_gen_unique"]
        )
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
        g = m.generate(
            input_ids=t(x["input_ids"]),
            attention_mask=torch.ones_like(t(x["input_ids"])),
            max_new_tokens=NEW,
            do_sample=False,
            num_beams=1,
        )[:, L:].numpy()
    m.generation_config = gc
    return min(len(set(r.tolist())) for r in g) >= gu


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
        if not prescreen(m, kind, x, io_.get("gu", 3)):
            continue
        shutil.rmtree(d, ignore_errors=True)
        os.makedirs(d)
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
            json.dump(hub, f, indent=2, sort_keys=True)
            f.write("\n")
        if "load" in case:
            m2 = case["load"](d, cls)
        else:
            m2 = load(d, cls)
        clean_gen(m2)
        e = run(m2, kind, x)
        meta = dict(
            name=name,
            architecture=hub["architectures"][0],
            kind=kind,
            seed=seed,
            transformers=transformers.__version__,
            torch=torch.__version__,
        )
        meta["reload_diff"] = float(np.abs(pre - e["logits"]).max())
        bad = check(e, meta, io_.get("gu", 3))
        if meta["reload_diff"] > 1e-5:
            bad.append(f"reload differs {meta['reload_diff']}")
        # Hub-style config must give the same model
        with tempfile.TemporaryDirectory() as td:
            shutil.copy(os.path.join(d, "model.safetensors"), td)
            shutil.copy(os.path.join(d, "config_hub.json"), os.path.join(td, "config.json"))
            m3 = case["load"](td, cls) if "load" in case else load(td, cls)
            meta["hub_config_diff"] = float(np.abs(f32(fwd_logits(m3, kind, x)) - e["logits"]).max())
        if meta["hub_config_diff"] > 0:
            bad.append(f"hub config differs {meta['hub_config_diff']}")
        # noise level: the same model in float64
        with torch.no_grad():
            m64 = copy.deepcopy(m2).double()
            lg64 = fwd_logits(m64, kind, x).float().numpy()
        meta["fp64_diff"] = float(np.abs(lg64 - e["logits"]).max())
        x["_ref"] = {k: e[k] for k in ("padL_logits", "padR_logits") if k in e}
        meta["sens_1e-6"] = perturb_sens(m2, kind, x, e["logits"], seed)
        x.pop("_ref")
        if meta["fp64_diff"] > 1e-3:
            bad.append(f"fp64 diff {meta['fp64_diff']:.1e}")
        if meta["sens_1e-6"] > 1e-3:
            bad.append(f"sens {meta['sens_1e-6']:.1e}")
        if "extra" in case:
            e.update(case["extra"](m2, x, meta, bad, d))
        if not bad:
            break
        if verbose:
            print(f"  {name} seed {seed}: {bad}", flush=True)
    else:
        raise SystemExit(f"{name}: no good seed: {bad}")
    arrays = dict(x)
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
            except Exception as ex:
                meta["mutations"][mn] = f"error {type(ex).__name__}: {str(ex)[:80]}"
    n = sum(p.numel() for p in m2.parameters())
    meta["params"] = n
    with open(os.path.join(d, "meta.json"), "w") as f:
        json.dump(meta, f, indent=1, sort_keys=True)
        f.write("\n")
    for fn in os.listdir(d):
        os.chmod(os.path.join(d, fn), 0o644)
    return meta
