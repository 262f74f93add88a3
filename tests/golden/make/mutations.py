"""Configs that differ in one detail."""

import copy


def setc(**kw):
    def f(cfg):
        for k, v in kw.items():
            setattr(cfg, k, v)

    return f


def rope(**kw):
    def f(cfg):
        rp = dict(cfg.rope_parameters)
        for k, v in kw.items():
            if v is None:
                rp.pop(k, None)
            else:
                rp[k] = v
        cfg.rope_parameters = rp

    return f


def rope_default(cfg):
    cfg.rope_parameters = {"rope_type": "default", "rope_theta": cfg.rope_parameters["rope_theta"]}


def rope_lt(lt, **kw):
    def f(cfg):
        rp = copy.deepcopy(cfg.rope_parameters)
        rp[lt].update(kw)
        cfg.rope_parameters = rp

    return f


def swap_types(cfg):
    cfg.layer_types = [
        {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}[q] for q in cfg.layer_types
    ]


def W(w):
    return {
        "window-1": setc(sliding_window=w - 1),
        "window+1": setc(sliding_window=w + 1),
        "window=full": setc(sliding_window=1000),
    }
