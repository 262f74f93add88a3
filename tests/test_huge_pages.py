"""When train.py begins again with huge pages, and that it then does."""

import os
import sys

import pytest

from transformer import huge_pages
from transformer.huge_pages import TUNABLE, VARIABLE

ADDED = {VARIABLE: TUNABLE}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine with glibc, no accelerator, and huge pages for those who ask."""
    monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: ("glibc", "2.36"))
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_where_pages_must_be_asked_for_they_are(root):
    assert huge_pages.advised({}, root) == ADDED


@pytest.mark.parametrize("enabled", ["[always] madvise never", "always madvise [never]"])
def test_where_the_machine_has_decided_nothing_is_asked(root, enabled):
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text(enabled)
    assert huge_pages.advised({}, root) == {}


@pytest.mark.parametrize("library", [("glibc", "2.34"), ("glibc", "2.9.1"), ("", "")])
def test_other_allocators_are_left_alone(root, monkeypatch, library):
    monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: library)
    assert huge_pages.advised({}, root) == {}


def test_a_kernel_without_huge_pages(root):
    (root / "sys/kernel/mm/transparent_hugepage/enabled").unlink()
    assert huge_pages.advised({}, root) == {}


@pytest.mark.parametrize("device", ["accel0", "vfio/0", "nvidia0"])
def test_accelerators_need_none_unless_the_cpu_is_named(root, device):
    path = root / "dev" / device
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert huge_pages.advised({}, root) == {}
    assert huge_pages.advised({"JAX_PLATFORMS": "tpu"}, root) == {}
    assert huge_pages.advised({"JAX_PLATFORMS": "cpu"}, root) == ADDED


def test_what_the_user_set_stays(root):
    assert huge_pages.advised({VARIABLE: ""}, root) == {}


def test_the_same_command_begins_again_once(monkeypatch):
    calls = []
    monkeypatch.setattr(huge_pages.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(huge_pages, "advised", lambda environ: {} if VARIABLE in environ else ADDED)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "utf8", "train.py", "--workdir", "a b"])
    monkeypatch.delenv(VARIABLE, raising=False)
    huge_pages.begin_again()
    command = [sys.executable, "-X", "utf8", "train.py", "--workdir", "a b"]
    assert calls == [(sys.executable, command, os.environ | ADDED)]
    monkeypatch.setenv(VARIABLE, TUNABLE)
    huge_pages.begin_again()
    assert len(calls) == 1
