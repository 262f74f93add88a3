"""A plan survives being written."""

import dataclasses
import json

import pytest

from transformer.planning import report
from transformer.settings import SettingsError

SMALL = report.Report(
    request=report.Request(
        config="llama3:8b", topology="v5p:4x4x4", chip="v5p", devices=64, chips=64, slices=1, mesh={"fsdp": 64},
        kind="train", rows=64, length=8192, overrides={"compute.remat": '"full"'}, tokens=15e12,
    ),
    memory=report.Memory(
        offered=100, parts=report.Parts(parameters=4, optimizer=8, gradients=4, activations={"residual": 3}, buffers=1),
        largest=(report.Buffer(name="head/kernel", bytes=4),),
    ),
    flops=report.Flops(model={"ffn": 1.0}, compiled=2.0, kernels={"splash": 3.0}),
    bytes=report.Bytes(minimal=5.0),
    exchanges=(
        report.Exchange(
            kind="all-gather", axes=("fsdp",), purpose="parameters", overlapped=True, times=2, operand=3, sent=4
        ),
        report.Exchange(
            kind="all-reduce", axes=None, purpose="activations", overlapped=False, times=2, operand=3, sent=4
        ),
    ),
    estimate=report.Estimate(
        terms={"matmul": 0.5}, step=1.0, mfu=0.4, tokens_per_second=1e6, assumptions=("None is measured.",)
    ),
    compile=report.Compile(seconds=3.0, max_rss=10),
)  # fmt: skip


def test_what_is_written_is_read_again():
    assert report.from_json(SMALL.to_json()) == SMALL
    assert report.from_json(dataclasses.replace(SMALL, compile=None).to_json()).compile is None


def test_what_is_no_report_is_refused_by_name():
    values = json.loads(SMALL.to_json())
    values["request"]["mesh"]["fsdp"] = "many"
    with pytest.raises(SettingsError, match=r"request\.mesh\.fsdp='many': expected int"):
        report.from_json(json.dumps(values))


def test_memory_goes_by_what_was_compiled():
    assert SMALL.memory.needed == 20 and SMALL.memory.fits
    assert not dataclasses.replace(SMALL.memory, peak=101).fits
    with pytest.raises(ValueError, match="nowhere"):
        report.Parts(parameters=1, activations={"nowhere": 1})


def test_days_of_a_budget():
    assert SMALL.estimate.days(86400e6) == pytest.approx(1.0)
