"""All figures on one page that needs nothing else: no server, no network."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs

from transformer import figures
from transformer.figures import questions
from transformer.figures.look import PALETTES, Look, repainted
from transformer.figures.sections import SECTIONS, Section, Shown
from transformer.figures.words import WORDS

THEMES = ("auto", *PALETTES)


def page(language: str = "en", theme: str = "auto", sections: Sequence[Section] = SECTIONS) -> str:
    """A whole HTML page of the figures of `sections`, computed now; it holds plotly itself and loads nothing.

    Small models are trained on the spot for some of the figures. Its controls are the browser's own, so that keys,
    screen readers and fingers work them.

    Args:
      theme: "light", "dark", or "auto" for the reader's own; a button of the page changes it.

    Raises:
      ValueError: an unknown language or theme.
    """
    if theme not in THEMES:
        raise ValueError(f"theme={theme!r}: use one of {', '.join(THEMES)}")
    look = Look(language)
    parts = [_head(look, sections)]
    for section in sections:
        title, text = (_text(look(f"{what} {section.name}")) for what in ("section", "about"))
        parts.append(f'<section aria-labelledby="{section.name}"><h2 id="{section.name}">{title}</h2><p>{text}</p>')
        parts += [_figure(f"{section.name}-{i}", shown, look) for i, shown in enumerate(section.shown)]
        parts.append("</section>")
    parts.append(_questions(look))
    return _html(look, theme, "\n".join(parts))


def variants(shown: Shown, look: Look) -> Iterator[tuple[tuple[int, ...], go.Figure]]:
    """Which option of each choice, and the figure that is asked for by them."""
    every = [list(enumerate(choice.options.values())) for choice in shown.choices]
    for options in itertools.product(*every):
        asked = dict(shown.arguments)
        for _, arguments in options:
            asked |= arguments
        yield tuple(i for i, _ in options), getattr(figures, shown.figure)(**asked, language=look.language)


def _head(look: Look, sections: Sequence[Section]) -> str:
    links = [(section.name, look(f"section {section.name}")) for section in sections]
    links.append(("check", look("section check")))
    items = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in links)
    words = {key: escape(look(key)) for key in ("page", "change theme", "page note", "contents")}
    return (
        f'<header><h1>{words["page"]}</h1><button type="button" id="theme">{words["change theme"]}</button>'
        f'<p>{words["page note"]}</p><nav aria-label="{words["contents"]}"><ul>{items}</ul></nav></header>'
    )


def _figure(name: str, shown: Shown, look: Look) -> str:
    """A figure with its controls; its numbers lie beside it as JSON, each trace once."""
    pool: dict[str, int] = {}
    drawn = {",".join(map(str, at)): _drawn(figure, pool) for at, figure in variants(shown, look)}
    first = next(iter(drawn.values()))
    kept = dict(least=shown.least, traces=[json.loads(trace) for trace in pool], variants=drawn)
    controls = [_choice(f"{name}-{i}", choice, look) for i, choice in enumerate(shown.choices)]
    if len(first["steps"]) > 1:
        controls.append(_slider(name, first, look))
    bar = f'<div class="controls">{"".join(controls)}</div>' if controls else ""
    title, told = first["steps"][first["start"]]["title"]
    return (
        f'<figure id="{name}" data-figure="{shown.figure}"><figcaption><h3 id="{name}-title">'
        f'<a class="anchor" href="#{name}" aria-hidden="true" tabindex="-1">#</a>{title}</h3>'
        f'<p class="told" aria-live="polite">{told}</p></figcaption>{bar}'
        f'<div class="scroll" tabindex="0" role="group" aria-labelledby="{name}-title">'
        f'<div class="plot" style="height: {first["layout"]["height"]}px"></div></div>'
        f'<script type="application/json">{_json(kept)}</script></figure>'
    )


def _drawn(figure: go.Figure, pool: dict[str, int]) -> dict[str, Any]:
    """A figure as the page keeps it: steps, each of them traces by their number in `pool`, title and what else changes.

    The slider becomes the browser's, and the title a caption, which wraps.
    """
    whole = json.loads(pio.to_json(figure, validate=False))
    layout = whole["layout"]
    layout.pop("template", None)
    sliders = layout.pop("sliders", None)
    title = layout.pop("title")["text"]
    frames = whole.get("frames") or [dict(name="", data=whole["data"], layout={})]
    steps = []
    for frame in frames:
        own = frame["layout"]
        traces = [pool.setdefault(json.dumps(trace, ensure_ascii=False), len(pool)) for trace in frame["data"]]
        caption = _caption(own.pop("title", dict(text=title))["text"])
        steps.append(dict(name=frame["name"], traces=traces, title=caption, layout=own))
    kept = dict(layout=layout, steps=steps, start=0)
    if sliders:
        layout["height"] -= 90  # that the slider took
        kept |= dict(start=sliders[0].get("active", 0), prompt=sliders[0]["currentvalue"]["prefix"].rstrip(": "))
    return kept


def _caption(title: str) -> tuple[str, str]:
    """A title and what is said under it."""
    first, _, rest = title.partition("<br>")
    return first, re.sub(r"</?sup>", "", rest)


def _choice(name: str, choice, look: Look) -> str:
    labels = [look(option) if option in WORDS else option for option in choice.options]
    options = "".join(f'<option value="{i}">{escape(label)}</option>' for i, label in enumerate(labels))
    label = f'<label for="{name}-choice">{escape(look(f"choose {choice.name}"))}</label>'
    return f'<span>{label} <select id="{name}-choice">{options}</select></span>'


def _slider(name: str, drawn: dict[str, Any], look: Look) -> str:
    count, start = len(drawn["steps"]), drawn["start"]
    now = escape(drawn["steps"][start]["name"])
    play = f'<button type="button" class="play" aria-pressed="false">{escape(look("play"))}</button>'
    return (
        f'<span class="slider"><label for="{name}-step">{escape(drawn["prompt"])}</label> '
        f'<input type="range" id="{name}-step" min="0" max="{count - 1}" value="{start}" aria-valuetext="{now}"> '
        f'<output for="{name}-step">{now}</output> {play}</span>'
    )


def _questions(look: Look) -> str:
    asked = []
    for number, (question, answer) in enumerate(questions.asked(look), 1):
        summary = f"<summary>{number}. {_text(question)}</summary>"
        asked.append(f'<details id="question-{number}">{summary}<p>{_text(answer)}</p></details>')
    title, text = _text(look("section check")), _text(look("about check"))
    return f'<section aria-labelledby="check"><h2 id="check">{title}</h2><p>{text}</p>{"".join(asked)}</section>'


def _text(text: str) -> str:
    """Text with its [words](#place) as links."""
    return re.sub(r"\[([^\]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', escape(text))


def _json(value: Any) -> str:
    # Inside a script, only "</" could end it.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _html(look: Look, theme: str, body: str) -> str:
    style, script = (resources.files(figures).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    colors = "".join(
        f':root[data-theme="{name}"]{{color-scheme:{name};{"".join(f"--{k}:{v};" for k, v in vars(palette).items())}}}'
        for name, palette in PALETTES.items()
    )
    kept = dict(repainted=repainted(), play=look("play"), pause=look("pause"))
    # Before anything is painted, so that nothing flashes.
    early = (
        f'const asked="{theme}";document.documentElement.dataset.theme=asked!=="auto"?asked:'
        'matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light";'
    )
    return (
        f'<!doctype html>\n<html lang="{look.language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(look("page"))}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>:root{{--font:{look.font}}}{colors}\n{style}</style>\n'
        f"<script>{early}</script>\n<script>{get_plotlyjs()}</script>\n</head>\n<body><main>\n{body}\n</main>\n"
        f'<script type="application/json" id="kept">{_json(kept)}</script>\n<script>{script}</script>\n</body></html>\n'
    )
