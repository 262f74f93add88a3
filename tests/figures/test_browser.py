"""The page in a real browser: what its controls show is what the package computes, by mouse, keys and on a phone."""

import functools
import shutil

import numpy as np
import pytest

pytest.importorskip("plotly")

from tests.figures import screen
from transformer.figures.data import experts
from transformer.figures.experts import SIZES
from transformer.figures.look import PALETTES
from transformer.figures.page import page as write
from transformer.figures.sections import SECTIONS

pytestmark = pytest.mark.browser
FIGURES = {f"{section.name}-{i}": shown for section in SECTIONS for i, shown in enumerate(section.shown)}
MOST = 8e6  # bytes of the page
each = pytest.mark.parametrize("name", FIGURES)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(write(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a chromium on the path")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(chromium, file, width: int = 1280, scheme: str = "light"):
    """The page in a window, and a list of what it complains about or asks of the network."""
    tab = chromium.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
    wrong = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
    tab.goto(file.as_uri())
    return tab, wrong


@pytest.fixture(scope="module")
def desk(chromium, file):
    tab, wrong = opened(chromium, file)
    yield tab
    assert not wrong
    tab.close()


@each
def test_every_control_shows_what_the_package_computes(desk, name):
    shown = FIGURES[name]
    screen.show(desk, name)
    seen = set()
    for chosen in np.ndindex(*(len(choice.options) for choice in shown.choices)):
        screen.choose(desk, name, chosen)
        asked = functools.reduce(
            lambda known, pair: known | dict(list(pair[0].options.values())[pair[1]]),
            zip(shown.choices, chosen, strict=True),
            dict(shown.arguments),
        )
        for step in range(screen.steps(desk, name)):
            screen.slide(desk, name, step)
            said = screen.read(desk, name)
            seen.add(said)
            missing = [text for text in screen.expected(shown.figure, asked, step) if text not in said]
            assert not missing, (asked, step, said)
    assert len(seen) > 1 or not (shown.choices or screen.steps(desk, name) > 1), "the controls change what is read"


def test_routers_fill_the_squares_that_a_token_is_sent_to(desk):
    screen.show(desk, "experts-0")
    picks = [experts.random_picks(experts.mixture(name), 512)[0] for name in SIZES]
    for step in range(screen.steps(desk, "experts-0")):
        screen.slide(desk, "experts-0", step)
        assert screen.picked(desk, "experts-0") == [{*index[step].tolist()} for index in picks]


@each
def test_keys_move_every_control(desk, name):
    screen.show(desk, name)
    controls = desk.locator(f"#{name} :is(select, input, button)")
    for control in controls.all():
        control.focus()
        desk.keyboard.press("Shift+Tab")
        desk.keyboard.press("Tab")  # a key, so that the browser shows what has the focus
        assert control.evaluate("e => e === document.activeElement")
        assert control.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
        assert control.evaluate("e => (e.labels?.length || e.textContent.trim().length) > 0"), "it has a name"
    if desk.locator(f"#{name} input").count():
        slider, output = desk.locator(f"#{name} input"), desk.locator(f"#{name} output")
        slider.focus()
        said = []
        for key in ("End", "Home", "ArrowRight"):
            desk.keyboard.press(key)
            said.append(output.inner_text())
            assert slider.get_attribute("aria-valuetext") == said[-1]
        assert len(set(said[:2])) == 2 and said[2] != said[1]


def test_a_figure_plays(desk):
    screen.show(desk, "rope-0")
    slider, button = desk.locator("#rope-0 input"), desk.locator("#rope-0 .play")
    screen.slide(desk, "rope-0", 0)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    desk.wait_for_function("document.querySelector('#rope-0 input').value >= 2")
    button.click()
    stopped = slider.input_value()
    desk.wait_for_timeout(900)
    assert (slider.input_value(), button.get_attribute("aria-pressed")) == (stopped, "false")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light"), (390, "dark")])
def test_it_fits_and_follows_the_theme(chromium, file, width, scheme):
    tab, wrong = opened(chromium, file, width, scheme)
    for name in FIGURES:
        screen.show(tab, name)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert screen.paper(tab) == {PALETTES[scheme].paper}
    tab.locator("#theme").click()
    (other,) = set(PALETTES) - {scheme}
    assert screen.paper(tab) == {PALETTES[other].paper}
    assert not wrong
    tab.close()


def test_answers_lead_to_their_figures(desk, file):
    assert file.stat().st_size < MOST
    for number in range(1, 7):
        question = desk.locator(f"#question-{number}")
        question.locator("summary").press("Enter")
        links = question.locator("a").all()
        assert links and all(link.is_visible() for link in links)
        for link in links:
            place = link.get_attribute("href").removeprefix("#")
            link.press("Enter")
            desk.wait_for_function("id => document.querySelector(':target')?.id === id", arg=place)
            desk.wait_for_function("id => document.querySelector(`#${id} .main-svg`)", arg=place)
            assert desk.locator(f"#{place}").evaluate("e => Math.abs(e.getBoundingClientRect().top) < innerHeight")
