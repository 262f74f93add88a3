"""A plan as a page, and two side by side: from reports by analysis, with and without what a compiler adds."""

import dataclasses
import html.parser
import re
import subprocess

import pytest

from tests.planning.test_analysis import requested
from transformer.planning import analysis, difference, page, roofline, topology
from transformer.planning.report import Buffer, Bytes, Compile, Report
from transformer.settings import SettingsError


@pytest.fixture(scope="module")
def report() -> Report:
    """With words in it that HTML must not read, and what only a compiler tells."""
    made = analysis.report(*requested("qwen3_moe:30b-a3b", "v6e:4x4", {"fsdp": 4, "expert": 4}, num_layers=4))
    memory = dataclasses.replace(
        made.memory, peak=made.memory.parts.total, arguments=10**9, temporary=10**9,
        largest=(Buffer(name="bf16[8,4] <b>fusion & more</b>", bytes=3 * 2**30),),
    )  # fmt: skip
    return dataclasses.replace(
        made, memory=memory, bytes=Bytes(minimal=1e9, hbm=2e9),
        compile=Compile(seconds=12.0, max_rss=10**9, cycles={"matmul": 1e9}), versions={"jax": "0.12"},
    )  # fmt: skip


class Checker(html.parser.HTMLParser):
    """Tags that are opened are closed, and nothing is loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe") and not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text: str) -> str:
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return " ".join(checker.text)


def test_a_page_has_all_of_the_report(report):
    text = page.page(report)
    seen = read(text)
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    for name in ("parameters", "optimizer", "gradients", *report.estimate.terms, *report.memory.parts.activations):
        assert name in seen or not report.estimate.terms.get(name, 1)
    for sentence in report.estimate.assumptions:
        assert sentence in seen
    assert report.estimate.rule in seen and topology.parse(report.request.topology).accelerator in seen
    assert report.request.command in seen
    for exchange in report.exchanges:
        assert exchange.kind in seen and " × ".join(exchange.axes) in seen
    assert "bf16[8,4] <b>fusion & more</b>" in seen and "<b>fusion" not in text
    assert "It fits" in seen and "chip-hours" in seen and "918 TFLOP/s" in seen
    widths = [float(w) for w in re.findall(r"width: ([\d.]+)%", text)]
    assert widths and max(widths) <= 100


def test_a_page_says_that_it_does_not_fit(report):
    small = dataclasses.replace(report, memory=dataclasses.replace(report.memory, offered=2**30), compile=None)
    seen = read(page.page(small))
    assert "It does not fit" in seen and "nothing compiled" in seen


def test_days_and_chip_hours(report):
    asked = roofline.Asked(topology=topology.parse("2*v5p:2x2x1"), mesh={}, tokens=0)
    days = report.estimate.days(1e12)
    assert days == pytest.approx(1e12 / report.estimate.tokens_per_second / 86400)
    assert roofline.chip_hours(asked, report.estimate, 1e12) == pytest.approx(days * 24 * 8)


def test_two_plans_side_by_side(report):
    other = analysis.report(*requested("qwen3_moe:30b-a3b", "v6e:4x4", {"fsdp": 16}, num_layers=4))
    rows = {row.name: row for row in difference.compare(report, other)}
    same, less = rows["parameters"], rows["buffers"]
    assert same.change == 0 and less.change == pytest.approx(less.b / less.a - 1)
    assert rows["bytes of HBM"].b is None and rows["bytes of HBM"].change is None
    assert rows["sent by all-gather along fsdp × expert"].b is None
    total = sum(row.a or 0 for name, row in rows.items() if name.startswith("sent by"))
    assert total == pytest.approx(sum(e.sent for e in report.exchanges) / 1e9)
    seen = read(page.difference_page(report, other, tuple(rows.values()), ("one", "other")))
    assert "one and other" in seen and f"{less.change:+.1%}" in seen
    assert all(row.change == 0 for row in difference.compare(report, report) if row.change is not None)


def test_a_revision_runs_its_own_command(tmp_path, report):
    """A repository whose command writes a report; one revision's fails."""

    def git(*arguments: str) -> str:
        named = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        done = subprocess.run(["git", *named, "-C", tmp_path, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "trunk")
    package = tmp_path / "transformer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "report.json").write_text(report.to_json())
    command = "import sys, shutil; assert sys.argv[1:3] == ['--config', 'x']; shutil.copy('report.json', sys.argv[-1])"
    for text in (command, "import sys; sys.exit('error: no such thing')"):
        (package / "plan.py").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", "a step")
    assert difference.at_revision("HEAD~1", ["--config", "x"], tmp_path) == report
    with pytest.raises(SettingsError, match=r"revision 'HEAD': transformer.plan ended with 1: error: no such thing"):
        difference.at_revision("HEAD", ["--config", "x"], tmp_path)
    with pytest.raises(SettingsError, match=r"revision 'nowhere': .*; use a commit, branch or tag"):
        difference.at_revision("nowhere", [], tmp_path)
    assert len(git("worktree", "list").splitlines()) == 1
