"""When train.py begins again with huge pages, and that it then does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer import huge_pages
from transformer.huge_pages import BEGUN, TUNABLE, VARIABLE

ADDED = {VARIABLE: TUNABLE}
ROOT = Path(__file__).parent.parent


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


def test_a_kernel_without_huge_pages_or_one_that_does_not_tell(root):
    policy = root / "sys/kernel/mm/transparent_hugepage/enabled"
    policy.unlink()
    assert huge_pages.advised({}, root) == {}
    policy.mkdir()  # read as root, who may read everything, this fails all the same
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


@pytest.fixture
def calls(monkeypatch):
    """What would replace this process."""
    calls = []
    monkeypatch.setattr(huge_pages.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(huge_pages, "advised", lambda environ: {} if VARIABLE in environ else ADDED)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), "--workdir", "a b"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-uB", *sys.argv])
    for name in (VARIABLE, BEGUN):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_the_same_command_begins_again_once(calls, monkeypatch):
    huge_pages.begin_again()
    [(path, command, environment)] = calls
    assert path == sys.executable and command == [sys.executable, "-uB", *sys.argv]
    assert environment == os.environ | ADDED | {BEGUN: "1"}
    monkeypatch.setenv(BEGUN, "1")  # and not the other: something took it away
    huge_pages.begin_again()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"],
        ["python", "-m", "pdb", "train.py", "--workdir", "a b"],
        ["python", "-um", "train.py", "--workdir", "a b"],
        ["python", "-c", "train.py", "--workdir", "a b"],
    ],
)
def test_what_else_runs_the_script_goes_on(calls, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", "--workdir", "a b"])
    monkeypatch.setattr(sys, "orig_argv", command)
    huge_pages.begin_again()
    assert not calls


def test_a_script_that_comes_through_a_pipe_goes_on(calls, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-", "--workdir", "a b"])
    monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
    huge_pages.begin_again()
    assert not calls


def test_where_nothing_can_be_executed_the_program_goes_on(calls, monkeypatch):
    def refuse(*call):
        calls.append(call)
        raise PermissionError

    monkeypatch.setattr(huge_pages.os, "execve", refuse)
    huge_pages.begin_again()
    assert len(calls) == 1


def test_train_begins_again_before_anything_else():
    script = "import sys, runpy; from transformer import huge_pages; huge_pages.begin_again = lambda: sys.exit(7); "
    script += "runpy.run_path('train.py', run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 7


def test_the_second_process_is_given_all_that_the_first_was():
    """Arguments, input and exit code, and the variable."""
    if not huge_pages.advised({"JAX_PLATFORMS": "cpu"}):
        pytest.skip("this machine gives no huge pages to those who ask")
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, BEGUN)}
    command = [sys.executable, str(Path(__file__).with_name("begin_again.py")), "a b", ""]
    shown = subprocess.run(
        command, cwd=ROOT, env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, input="read",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (shown.returncode, shown.stdout) == (3, f"['a b', ''] read {TUNABLE}\n")
