"""All figures on one page that needs nothing else: no server, no network."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from transformer import figures
from transformer.figures.look import Look

# In the order of the lesson: a section, and its figures with what they are asked for.
Section = tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]
SECTIONS: tuple[Section, ...] = (
    ("journey", (("token_journey", {}), ("softmax_steps", {}))),
    (
        "families",
        (
            ("block_diagrams", dict(one="gpt3:175b", other="llama3:8b")),
            ("block_diagrams", dict(one="llama3:8b", other="deepseek_v3:671b")),
            ("family_table", {}),
        ),
    ),
    ("attention", (("attention_steps", {}), ("attention_steps", dict(causal=False)))),
    ("decoding", (("decoding_work", {}), ("decoding_flops", {}))),
    ("caches", (("cache_sizes", {}), ("published_caches", {}))),
    ("windows", (("receptive_field", {}), ("layer_patterns", {}), ("ring_cache", {}))),
    ("rope", (("rope_rotation", {}), ("rope_scores", {}), ("rope_wavelengths", {}))),
    ("experts", (("router_grid", {}), ("expert_load", {}), ("dropped_tokens", {}))),
    ("tiles", (("attention_tiles", {}), ("online_softmax", {}), ("memory_traffic", {}))),
    ("sharding", (("sharding", {}),)),
)

STYLE = """
body {{ margin: 0; background: {paper}; color: {ink}; font-family: {font}; line-height: 1.5 }}
main {{ max-width: 1240px; margin: 0 auto; padding: 1.5rem }}
nav {{ display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; padding: .8rem 0; border-bottom: 1px solid {line} }}
a {{ color: {blue}; text-decoration: none }}
h2 {{ margin: 3rem 0 .3rem }}
p {{ color: {muted}; margin: 0 0 1rem; max-width: 70ch }}
.figure {{ overflow-x: auto; margin-bottom: 1.5rem }}
"""


def page(language: str = "en", theme: str = "light", sections: Sequence[Section] = SECTIONS) -> str:
    """A whole HTML page of the figures of `sections`, computed now; it holds plotly itself and loads nothing.

    Small models are trained on the spot for some of the figures.
    """
    look = Look(language, theme)
    links = " ".join(f'<a href="#{name}">{escape(look(f"section {name}"))}</a>' for name, _ in sections)
    parts = [f"<h1>{escape(look('page'))}</h1><p>{escape(look('page note'))}</p><nav>{links}</nav>"]
    for name, drawn in sections:
        title, text = (escape(look(f"{what} {name}")) for what in ("section", "about"))
        parts.append(f'<h2 id="{name}">{title}</h2><p>{text}</p>')
        for number, (figure, arguments) in enumerate(drawn):
            made = getattr(figures, figure)(**arguments, language=language, theme=theme)
            # A figure without a width of its own takes the page's.
            div = made.to_html(
                full_html=False, include_plotlyjs=False, div_id=f"{name}-{number}", auto_play=False,
                config=dict(displaylogo=False, responsive=True),
            )  # fmt: skip
            parts.append(f'<div class="figure">{div}</div>')
    return _html(look, "\n".join(parts))


def _html(look: Look, body: str) -> str:
    c = look.colors
    style = STYLE.format(paper=c.paper, ink=c.ink, line=c.line, muted=c.muted, blue=c.blue, font=look.font)
    return (
        f'<!doctype html>\n<html lang="{look.language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(look("page"))}</title>\n'
        f"<style>{style}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body><main>\n{body}\n</main></body></html>\n"
    )
