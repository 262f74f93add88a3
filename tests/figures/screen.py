"""The page through a reader's eyes and fingers, and what should be read there."""

import dataclasses
import functools

import numpy as np

from transformer.figures.data import (
    attention,
    caches,
    decoding,
    experts,
    families,
    journey,
    placement,
    plan,
    prefix,
    published,
    rope,
    tiles,
    windows,
)
from transformer.figures.experts import SIZES
from transformer.figures.families import NUMBERS
from transformer.figures.latent import HEADS
from transformer.figures.look import Look
from transformer.figures.plan import MESHES
from transformer.figures.sizes import binary, gib
from transformer.spec import Mask

LOOK = Look()
LENGTHS = tuple(1024 << power for power in range(8))
CAUSAL = Mask(causal=True)
toy, influence = functools.cache(attention.toy), functools.cache(windows.influence)  # asked at every step


def show(tab, name: str) -> None:
    """Scrolls to a figure, which is drawn then."""
    tab.locator(f"#{name}").scroll_into_view_if_needed()
    tab.wait_for_function("id => document.querySelector(`#${id} .main-svg`)", arg=name)


def choose(tab, name: str, chosen: tuple[int, ...]) -> None:
    """Sets all selects of a figure."""
    for select, option in zip(tab.locator(f"#{name} select").all(), chosen, strict=True):
        select.select_option(str(option))


def steps(tab, name: str) -> int:
    """How many places its slider has; 1 without one."""
    slider = tab.locator(f"#{name} input")
    return int(slider.get_attribute("max")) + 1 if slider.count() else 1


def slide(tab, name: str, step: int) -> None:
    """Moves its slider, if it has one, by keys."""
    slider = tab.locator(f"#{name} input")
    if not slider.count():
        return
    slider.focus()
    away = step - int(slider.input_value())
    for _ in range(abs(away)):
        tab.keyboard.press("ArrowRight" if away > 0 else "ArrowLeft")


def read(tab, name: str) -> str:
    """All that is written in a figure now: its caption, what its slider says, and the text of its drawing."""
    return tab.evaluate(
        """id => {
          const texts = [...document.querySelectorAll(`#${id} :is(figcaption, output, .plot text)`)];
          return texts.map(e => e.textContent).join("\\n");
        }""",
        name,
    ).replace("−", "-")


def paper(tab) -> set[str]:
    """Colours behind the figures that are drawn, and behind the page."""
    found = tab.evaluate(
        """() => [document.body, ...document.querySelectorAll(".plot .main-svg")]
          .map(e => getComputedStyle(e)).map(s => s.backgroundColor).filter(c => c !== "rgba(0, 0, 0, 0)")"""
    )
    return {"#" + "".join(f"{int(n):02x}" for n in color[4:-1].split(",")) for color in found}


def expected(figure: str, asked: dict, step: int) -> list[str]:
    """Numbers that a figure shows, by its data."""
    return [text.replace("−", "-") for text in globals()[f"_{figure}"](step, **asked)]


def _token_journey(_):
    found = journey.follow(*journey.learn()[:2])
    return [f"{found.probabilities.max():.2f}", *(f"{w:.2f}" for w in found.looks.reshape(-1))]


def _softmax_steps(_):
    return ["0.67", "0.24", "0.09", "7.39"]


def _block_diagrams(_, one, other):
    marked = [
        number for number, what in zip(NUMBERS, families.CHANGES, strict=True) if what in families.changes(one, other)
    ]
    layers = [f"× {published.model(name).trunk.num_layers}" for name in (one, other)]
    return (
        layers
        + [f"{number} " for number in marked]
        + [LOOK(key, **values) for name in (one, other) for key, values in families.aspects(name)["attention"][:1]]
    )


def _family_table(_):
    return [LOOK(key, **values) for name in published.LESSON for key, values in families.aspects(name)["size"]]


def _attention_steps(row, causal=True):
    found = toy(causal)
    who = LOOK("weights of", token=LOOK.token(attention.TOY_TOKENS[row]))
    said = [who, LOOK("masked" if causal else "not masked").split(":")[0], "= 1/√4"]
    return said + [f"{w:.2f}" for w in found.weights[row]] + [f"{abs(x):.3g}" for x in found.output[row].round(3)]


def _stale_cache(at, **asked):
    dead = prefix.stale(**asked)[at]
    return [f"{int(dead.sum())} of {dead.size} entries"]


def _decoding_work(step):
    runs = decoding.work(16)
    return [f"{run.total[step]:,}" for run in runs.values()] + [str(run.scores[step]) for run in runs.values()]


def _decoding_flops(_):
    flops = decoding.compiled().flops
    return [f"{flops['without'][-1] / flops['with'][-1]:.0f} times"]


def _decoding_limits(step):
    found = decoding.limits("llama3:8b", LENGTHS[step])
    rates = [f"{found.peak / 1e12:,.0f} TFLOP/s", f"{found.bandwidth / 1e9:,.0f} GB/s"]
    rates += ["beyond the 8,192"] if LENGTHS[step] > 8192 else []
    return [f"{s * 1e3:.2g}" for s in found.memory + found.compute] + [binary(found.weights[0]), *rates]


def _cache_sizes(step, preset, **shape):
    held = caches.schemes(dataclasses.replace(caches.Shape.of(preset), **shape), LENGTHS[step], "bfloat16")
    context = published.model(preset).max_length
    said = [f"beyond the {context:,}"] if LENGTHS[step] > context else []
    said += ["as published"] if not shape else []
    return said + ["if it used it"] + [binary(s.bytes) for s in held] + [f"{s.numbers // s.layers:,}" for s in held]


def _latent_cache(step):
    one = caches.latent("deepseek_v3:671b", HEADS[step])
    return [f"cached: {one.kept}", f"{one.made:,}", f"{one.heads} heads ×", f"({one.key} + {one.rope})"]


def _published_caches(_, dtype):
    sizes = [caches.size(n, published.model(n), 32768, dtype) for n in published.LESSON]
    short = [f"{s.length:,}" for s in sizes if s.length < 32768]
    return [binary(s.bytes) for s in sizes] + short + ["window 4,096", "5 with window 1,024"]


def _receptive_field(step, sinks=0, **asked):
    reached = influence(asked["windows"], 24, sinks)
    far = windows.reach(asked["windows"][: step + 1], sinks)
    assert far is None or int(reached[step, -1].sum()) == far
    return [LOOK("reach measured", count=int(reached[step, -1].sum())), LOOK("reach all") if far is None else f"{far}"]


def _layer_patterns(_):
    return ["gemma3:27b", "gpt_oss:120b"]


def _ring_cache(_, sinks=2):
    held = caches.slots(Mask(causal=True, window=6, sinks=sinks), 18)
    return [str(position) for position in held[-1]]


def _rope_rotation(step, distance):
    one, vector, at = rope.plain(8, 100.0), rope.content(8), np.array([distance + step])
    return [f"{rope.scores(one, vector, vector, at, at - distance)[0]:.3f}"]


def _rope_scores(_):
    return ["10,000", "500,000"]


def _rope_wavelengths(_):
    return ["8,192"]


def picked(tab, name: str) -> list[set[int]]:
    """The squares of each grid of routers that are filled now, by number."""
    return [
        set(cells)
        for cells in tab.evaluate(
            """id => document.querySelector(`#${id} .plot`)._fullData.filter(trace => trace.type === "heatmap")
              .map(trace => trace.z.flatMap(row => [...row]).flatMap((z, i) => (z > 0 ? [i] : [])))""",
            name,
        )
    ]


def _router_grid(_):
    return [LOOK("experts", count=m.num_experts, top=m.top_k) for m in map(experts.mixture, SIZES)]


def _expert_parameters(step):
    found = experts.sizes("mixtral:8x7b", (8, 16, 32, 64, 128), (1, 2, 4, 8)[step])
    return [f"{n / 1e9:.1f}" for both in found.values() for n in both]


def _expert_load(_):
    return [LOOK(f"remedy {remedy}") for remedy in experts.REMEDIES]


def _dropped_tokens(_):
    return list(SIZES)


def _attention_tiles(_, mask=CAUSAL, segments=None):
    cut = tiles.tiles(mask, 64, 8, 8, segments)
    return [f"{cut.visited} of {cut.order.size} tiles", str(cut.visited)]


def _online_softmax(step):
    q, k, v = np.random.default_rng(29).standard_normal((3, 16, 4))
    run = tiles.online(CAUSAL, q, k, v, 0.5, 15, 4)
    faded = f"= {run.fade[step]:.3f}" if step else LOOK("first tile")
    return [f"m = {run.top[step]:.3f}", f"= {run.total[step]:.3f}", faded, f"{run.error[step]:.2g}"]


def _memory_traffic(_):
    moved = tiles.traffic(CAUSAL, 16384, 128, 512)
    return [binary(sum(way.values())) for way in (moved.standard, moved.unskipped, moved.tiled)]


def _sharding(_, what, **mesh):
    found = placement.place("llama3:8b", what, **mesh)
    each = 2 * np.prod([stop - start for start, stop in found.parts[0]])
    return [f"{binary(each)} a device; copies of each part: {found.copies}"]


def _step_traffic(_, reference="llama3:tiny", **mesh):
    found = plan.compiled(reference, 16, 64, **mesh)
    return [binary(n) for by in (found.compiled, found.expected) for n in by.values()]


def _mesh_traffic(_, reference):
    sent = [plan.sent(reference, 64, 4096, fsdp=64 // ways, tensor=ways) for ways in (1, 2, 4, 8)]
    return [binary(sum(one.values())) for one in sent]


def _hbm_plan(_, reference):
    held = [plan.training(reference, 64, 4096, **mesh) for mesh in MESHES]
    held += [plan.decoding(reference, 64, 4096, **mesh) for mesh in MESHES]
    return [gib(sum(one.values())).removesuffix(" GiB") for one in held] + ["float32 (4 bytes"]
