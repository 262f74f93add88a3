"""An estimate says how it is made: its rule gives its step, and what it assumes is what it used."""

import ast
import dataclasses
import io
import re

import pytest
from rich.console import Console

from transformer.planning import analysis, assemble, moments, roofline, terminal, topology
from transformer.planning.report import COMPUTING, WAITED, Bytes, Compile, Exchange, Flops
from transformer.planning.request import ask

HOST = {"optimizer.moments_memory": "'pinned_host'"}


def value(rule: str, terms: dict[str, float]) -> float:
    """Of a sum of terms and of the longest of terms."""

    def of(node: ast.AST) -> float:
        match node:
            case ast.Name(id=name):
                return terms[name]
            case ast.BinOp(left=left, op=op, right=right):
                return of(left) + (1 if isinstance(op, ast.Add) else -1) * of(right)
            case ast.Call(args=args):
                return max(map(of, args))
        raise ValueError(rule)

    return of(ast.parse(rule, mode="eval").body)


def exchange(axes: tuple[str, ...], sent: float, overlapped: bool = False) -> Exchange:
    return Exchange(
        kind="all-gather", axes=axes, purpose="parameters", overlapped=overlapped, times=1, operand=sent, sent=sent
    )


WITHIN, HIDDEN, BETWEEN = exchange(("fsdp",), 5e9), exchange(("fsdp",), 9e10, True), exchange(("slice",), 1e9)
CASES = {
    "alone": dict(exchanges=()),
    "waited for": dict(exchanges=(WITHIN,)),
    "beside": dict(exchanges=(WITHIN, HIDDEN)),
    "slices": dict(exchanges=(WITHIN, BETWEEN)),
    "hbm": dict(exchanges=(WITHIN,), size=Bytes(minimal=1e12)),
    "host": dict(exchanges=(WITHIN,), size=Bytes(minimal=1e9, host=1e10)),
    "cycles": dict(exchanges=(WITHIN,), compiled=Compile(seconds=1, max_rss=1, cycles={"matmul": 1e8, "loop": 1e7})),
    "elementwise": dict(exchanges=(WITHIN,), elementwise=1e10),
}


def estimate(exchanges, chip: str = "v5p", **how):
    on = topology.parse(f"2*{chip}:4x4x4")
    asked = roofline.Asked(topology=on, mesh={"slice": 2, "fsdp": on.devices // 2}, tokens=1e5)
    flops = Flops(model={"ffn": 1e14}, kernels={"attention": 1e13})
    return roofline.estimate(asked, flops, how.pop("size", Bytes(minimal=1e9)), exchanges, **how)


@pytest.mark.parametrize("case", CASES)
def test_the_rule_of_the_terms_is_the_step(case):
    found = estimate(**CASES[case])
    assert value(found.rule, found.terms) == pytest.approx(found.step, rel=1e-12)
    named = set(re.findall(r"[a-z]+", found.rule)) - {"max"}
    assert named == {name for name, seconds in found.terms.items() if seconds}


@pytest.mark.parametrize(
    ("case", "longest"),
    [("alone", "matmul"), ("hbm", "hbm"), ("host", "host"), ("slices", "matmul"), ("beside", "matmul")],
)
def test_the_longest_term_is_the_one_that_counts_most(case, longest):
    """What goes on beside other work is not waited for."""
    found = estimate(**CASES[case])
    assert found.longest == longest and found.terms[longest] <= found.step
    assert set(found.terms) == {*COMPUTING, "hbm", *WAITED, "hidden"}


@pytest.mark.parametrize("case", CASES)
def test_what_is_assumed_was_used(case):
    found = estimate(**CASES[case])
    said = " ".join(found.assumptions)
    words = {
        "ici": "A link carries", "dcn": "Between slices", "host": "the host's memory", "elementwise": "arrays once",
    }  # fmt: skip
    if case == "cycles":
        words.pop("elementwise")
    for name, text in words.items():
        assert (text in said) == bool(found.terms[name]), text


def test_moments_that_rest_with_the_host_are_waited_for():
    """Both moments of a parameter of four bytes come and go at the published rate of the link."""
    on = "v5p:2x2x1"
    here, there = (
        analysis.report(a.request, a.run) for a in (ask("llama3:8b", on), ask("llama3:8b", on, overrides=HOST))
    )
    assert there.bytes.host == pytest.approx(2 * 4 * 8.03e9 / 4, rel=1e-3) and here.bytes.host == 0
    assert there.estimate.terms["host"] == pytest.approx(there.bytes.host / 16e9)
    assert there.estimate.step == pytest.approx(here.estimate.step + there.estimate.terms["host"])
    assert there.memory.parts.optimizer == 0 < here.memory.parts.optimizer
    unknown = estimate((), chip="tpu7x", size=Bytes(minimal=1e9, host=1e10))
    assert unknown.terms["host"] == 0 and "isn't published: not counted" in unknown.assumptions[-1]


def test_only_what_rests_with_the_host_travels():
    asked = ask("llama3:tiny", "v5e:2x2", overrides=HOST | {"optimizer.moments_dtype": "'bfloat16'"})
    model, optimizer = asked.run.spec, asked.run.settings.optimizer
    here = dataclasses.replace(optimizer, moments_memory="device")
    assert moments.host_bytes(model, optimizer, asked.mesh, "default") > 0
    assert moments.host_bytes(model, here, asked.mesh, "default") == 0


def told(report) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(terminal.render(report), highlight=False)
    return console.file.getvalue()


def test_the_parts_that_are_printed_add_up():
    report = assemble.analysed(ask("qwen3_moe:tiny", "v5e:2x2", rows=8, overrides={"train.accumulate": "2"}))
    for peak, arguments in ((3.456, 1.234), (0.444, 0.333), (2.005, 1.995)):
        sizes = dict(peak=round(peak * 2**30), arguments=round(arguments * 2**30))
        text = told(dataclasses.replace(report, memory=dataclasses.replace(report.memory, **sizes)))
        whole = re.search(r"([\d.]+) of 15.75 GiB, compiled", text)[1]
        kept, beside = re.search(r"of it ([\d.]+) arguments, which stay, and ([\d.]+) beside them", text).groups()
        assert float(kept) + float(beside) == pytest.approx(float(whole), abs=1e-9)
    assert sum(report.memory.parts.named.values()) == report.memory.parts.total
    assert f"buffers  {terminal.amount(report.memory.parts.buffers)}" in re.sub(r"  +", "  ", text)
    assert terminal.BUFFERS in text


def test_what_microbatches_send_beside_one_is_told():
    one, two = (
        assemble.analysed(ask("llama3:tiny", "v5e:2x2", rows=8, overrides={"train.accumulate": n})) for n in ("1", "2")
    )
    more = sum(e.sent for e in two.exchanges) - sum(e.sent for e in one.exchanges)
    said = re.search(r"2 microbatches gather .*: ([\d.]+) GB more than one would send", told(two))
    assert float(said[1]) == pytest.approx(more / 1e9, abs=5e-4) and "microbatches" not in told(one)
