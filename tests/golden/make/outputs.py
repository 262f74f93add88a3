"""What a model is given, and what it computes: logits, hidden states, routers, gradients, greedy continuations."""

import math

import numpy as np
import torch

from tests.golden.make.weights import rng_for

NEW = 16  # greedy tokens


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
        mL = np.ones((B, T), np.int64)
        mL[1, :k] = 0
        idL = r.integers(lo, hi, (B, T))
        idL[mL == 0] = pad
        pos = np.clip(np.cumsum(mL, -1) - 1, 0, None)
        x.update(padL_input_ids=idL, padL_attention_mask=mL, padL_position_ids=pos)
        mR = np.ones((B, T), np.int64)
        mR[0, T - k - 2 :] = 0
        idR = r.integers(lo, hi, (B, T))
        idR[mR == 0] = pad
        x.update(padR_input_ids=idR, padR_attention_mask=mR)
    elif kind == "bert":
        x["token_type_ids"] = r.integers(0, hub.get("type_vocab_size", 2), (B, T))
        mR = np.ones((B, T), np.int64)
        mR[1, T - 9 :] = 0
        idR = r.integers(lo, hi, (B, T))
        idR[mR == 0] = pad
        x.update(
            padR_input_ids=idR,
            padR_attention_mask=mR,
            padR_token_type_ids=r.integers(0, hub.get("type_vocab_size", 2), (B, T)) * mR,
        )
    elif kind == "seq2seq":
        dlo, dhi = io_.get("dec_ids", (lo, hi))
        lab = r.integers(dlo, dhi, (B, io_["Td"]))
        lab[1, -4:] = -100
        x["labels"] = lab
        mR = np.ones((B, T), np.int64)
        mR[1, T - 11 :] = 0
        idR = r.integers(lo, hi, (B, T))
        idR[mR == 0] = pad
        x.update(padR_input_ids=idR, padR_attention_mask=mR)
    return {k: np.asarray(v, np.int64) for k, v in x.items()}


def t(a):
    return torch.from_numpy(np.asarray(a))


def f32(a):
    return a.detach().to(torch.float32).cpu().numpy()


@torch.no_grad()
def fwd_logits(m, kind, x):
    if kind == "causal":
        return m(input_ids=t(x["input_ids"]), use_cache=False).logits
    if kind == "bert":
        return m(input_ids=t(x["input_ids"]), token_type_ids=t(x["token_type_ids"])).prediction_logits
    return m(input_ids=t(x["input_ids"]), decoder_input_ids=t(x["decoder_input_ids"]), use_cache=False).logits


def run(m, kind, x, full=True):
    e = {}
    hk = Hooks(m)
    with torch.no_grad():
        if kind == "causal":
            o = m(input_ids=t(x["input_ids"]), output_hidden_states=True, use_cache=False)
            e["logits"] = f32(o.logits)
            e["hidden_states"] = np.stack([f32(h) for h in o.hidden_states])
            routers = hk.out
            hk.out = {}
            if routers:
                idx, w, lg = [], [], []
                for n in sorted(routers, key=lambda s: int(next(p for p in s.split(".") if p.isdigit()))):
                    l_, w_, i_ = routers[n]
                    o_ = torch.argsort(i_, dim=-1)
                    idx.append(torch.gather(i_, -1, o_).numpy().astype(np.int64))
                    w.append(f32(torch.gather(w_, -1, o_)))
                    lg.append(f32(l_))
                B, T = x["input_ids"].shape
                e["moe_layers"] = np.array(
                    [
                        int(next(p for p in s.split(".") if p.isdigit()))
                        for s in sorted(routers, key=lambda s: int(next(p for p in s.split(".") if p.isdigit())))
                    ]
                )
                e["moe_topk_idx"] = np.stack(idx).reshape(len(idx), B, T, -1)
                e["moe_topk_weight"] = np.stack(w).reshape(len(w), B, T, -1)
                e["moe_router_logits"] = np.stack(lg).reshape(len(lg), B, T, -1)
            o = m(
                input_ids=t(x["padL_input_ids"]),
                attention_mask=t(x["padL_attention_mask"]),
                position_ids=t(x["padL_position_ids"]),
                use_cache=False,
            )
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
            e["logits"] = f32(o.prediction_logits)
            e["nsp_logits"] = f32(o.seq_relationship_logits)
            e["hidden_states"] = np.stack([f32(h) for h in o.hidden_states])
            e["pooled"] = f32(m.bert(**kw).pooler_output)
            e["logits_no_tt"] = f32(m(input_ids=t(x["input_ids"])).prediction_logits)
            kw = dict(
                input_ids=t(x["padR_input_ids"]),
                token_type_ids=t(x["padR_token_type_ids"]),
                attention_mask=t(x["padR_attention_mask"]),
            )
            o = m(**kw)
            e["padR_logits"] = f32(o.prediction_logits) * x["padR_attention_mask"][..., None].astype(np.float32)
            e["padR_pooled"] = f32(m.bert(**kw).pooler_output)
        else:
            o = m(
                input_ids=t(x["input_ids"]),
                decoder_input_ids=t(x["decoder_input_ids"]),
                output_hidden_states=True,
                use_cache=False,
            )
            e["logits"] = f32(o.logits)
            e["encoder_hidden_states"] = np.stack([f32(h) for h in o.encoder_hidden_states])
            e["decoder_hidden_states"] = np.stack([f32(h) for h in o.decoder_hidden_states])
            o = m(
                input_ids=t(x["padR_input_ids"]),
                attention_mask=t(x["padR_attention_mask"]),
                decoder_input_ids=t(x["decoder_input_ids"]),
                use_cache=False,
            )
            e["padR_logits"] = f32(o.logits)
    hk.close()
    if not full:
        return e
    # loss and gradients (mean cross-entropy, labels shifted inside HF for causal LMs)
    if kind in ("causal", "seq2seq"):
        m.zero_grad(set_to_none=True)
        if kind == "causal":
            lab = x["padR_input_ids"].copy()
            lab[x["padR_attention_mask"] == 0] = -100
            o = m(
                input_ids=t(x["padR_input_ids"]),
                attention_mask=t(x["padR_attention_mask"]),
                labels=t(lab),
                use_cache=False,
            )
            e["loss_labels"] = lab
        else:
            o = m(
                input_ids=t(x["padR_input_ids"]),
                attention_mask=t(x["padR_attention_mask"]),
                labels=t(x["labels"]),
                use_cache=False,
            )
        o.loss.backward()
        e["loss"] = np.float32(o.loss.item())
        # transformers 5 makes parameters of sinusoids once they were loaded; they are not trained
        fixed = tuple(n for n, mod in m.named_modules() if "Sinusoidal" in type(mod).__name__)
        ps = [(n, p) for n, p in m.named_parameters() if p.grad is not None and not n.startswith(fixed)]
        e["grad_global_norm"] = np.float32(math.sqrt(sum(float(p.grad.double().pow(2).sum()) for _, p in ps)))
        e["grad_embed"] = f32(m.get_input_embeddings().weight.grad)
        m.zero_grad(set_to_none=True)
        if getattr(m.config, "router_aux_loss_coef", None) is not None:
            with torch.no_grad():
                o = m(input_ids=t(x["input_ids"]), output_router_logits=True, use_cache=False)
                if getattr(o, "aux_loss", None) is not None:
                    e["aux_loss"] = np.float32(float(o.aux_loss))
                o = m(
                    input_ids=t(x["padR_input_ids"]),
                    attention_mask=t(x["padR_attention_mask"]),
                    output_router_logits=True,
                    use_cache=False,
                )
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
            e["_gen_unique"] = int(
                min(len(set(row.tolist())) for row in np.concatenate([e["gen_tokens"], e[pk + "_gen_tokens"]]))
            )
    return e
