"""What real processes do when one of them is stopped, killed or starved: they save, or end in time, and resume."""

import json
import random
import resource
import signal
import time

import pytest

from tests.training import processes

pytestmark = pytest.mark.slow
CONFIG = "llama3:tiny"
STEPS = 100
TINY = {
    **processes.TEXTS,
    "model.d_model": 32, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1, "model.d_ff": 32,
    "data.seq_len": 32, "data.batch_size": 8, "optimizer.warmup_steps": 2, "mesh.data": 1, "mesh.fsdp": 2,
    "train.steps": STEPS, "train.checkpoint_every": 10, "train.eval_every": 0, "train.eval_batches": 1,
    "train.log_every": 1,
}  # fmt: skip
QUICK = ("--heartbeat-timeout=30", "--start-timeout=300")
PATIENCE = 600
SOON = 90  # seconds: the heartbeat's and some, for a machine that has much to do


def start(workdir, flags=QUICK, **more):
    fields = {**TINY, **{name.replace("__", "."): value for name, value in more.items()}}
    return processes.start(workdir, 2, 1, CONFIG, fields, flags)


def wait_for(workdir, step):
    """Until that step is logged."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if processes.records(workdir)[-1]["step"] >= step:
                return
        except (OSError, ValueError, IndexError):
            pass
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


def wait_for_checkpoint(workdir):
    """Until one is whole: they are written beside the steps."""
    end = time.monotonic() + PATIENCE
    while not steps(workdir):
        assert time.monotonic() < end, "no checkpoint ever came"
        time.sleep(0.02)


def steps(workdir):
    return sorted(int(x.name) for x in (workdir / "checkpoints").glob("*") if x.name.isdecimal())


def seal(workdir):
    return json.loads((workdir / "checkpoints" / str(STEPS) / "checksums" / "metadata").read_text())


def assert_resumes(workdir, straight):
    """The same command ends as the run that wasn't disturbed, to the bit."""
    codes, outputs = processes.finish(start(workdir))
    assert codes == [0, 0], "\n---\n".join(outputs)
    assert seal(workdir) == seal(straight) and processes.records(workdir) == processes.records(straight)
    return outputs


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight") / "run"
    codes, outputs = processes.finish(start(workdir))
    assert codes == [0, 0], "\n---\n".join(outputs)
    return workdir


def stopped_by_a_storm(workdir, who, step):
    """The step at which both stopped, when one had got many signals from `step` on."""
    running = start(workdir, train__steps=5000)
    wait_for(workdir, step)
    for _ in range(50):
        running[who].send_signal(signal.SIGTERM)
        time.sleep(0.01)
    codes, outputs = processes.finish(running)
    assert codes == [0, 0], "\n---\n".join(outputs)
    last = steps(workdir)[-1]
    assert step <= last < 5000 and f"stopped by a signal: saved step {last}" in outputs[0]
    return last


def test_a_storm_of_signals_to_one_stops_both_at_one_step(tmp_path):
    first = stopped_by_a_storm(tmp_path / "twice", 1, 3)
    last = stopped_by_a_storm(tmp_path / "twice", 0, first + 3)
    stopped_by_a_storm(tmp_path / "once", 0, last)
    twice, once = (processes.records(tmp_path / name) for name in ("twice", "once"))
    assert [record["step"] for record in twice] == list(range(1, last + 1))
    assert twice == once[:last]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_silent_process_ends_the_other_in_time(straight, tmp_path, who, how):
    running = start(tmp_path / "run")
    wait_for(tmp_path / "run", random.Random(who).randint(12, 20))
    wait_for_checkpoint(tmp_path / "run")
    running[who].send_signal(how)
    begin = time.monotonic()
    output, _ = running[1 - who].communicate(timeout=PATIENCE)
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert running[1 - who].returncode != 0
    assert "another process is gone" in output or "another task died" in output
    running[who].kill()
    running[who].communicate()
    assert_resumes(tmp_path / "run", straight)


def test_a_hang_is_ended_by_the_watchdog(tmp_path):
    running = start(tmp_path / "run", flags=("--heartbeat-timeout=1000",), train__watchdog_seconds=20.0)
    wait_for(tmp_path / "run", 3)
    running[1].send_signal(signal.SIGSTOP)
    output, _ = running[0].communicate(timeout=PATIENCE)
    assert running[0].returncode == 3, output
    assert "error (process 0 of 2): hung: nothing was done for train.watchdog_seconds=20" in output
    assert "loop.py" in output.partition("hung")[2]
    running[1].kill()
    running[1].communicate()


def run_out_of_room(running, who):
    """Has one process find no room for a checkpoint; what both said, once they have ended, one soon after the other."""
    resource.prlimit(running[who].pid, resource.RLIMIT_FSIZE, (2000, 2000))
    outputs = {who: running[who].communicate(timeout=PATIENCE)[0]}
    begin = time.monotonic()
    outputs[1 - who] = running[1 - who].communicate(timeout=SOON)[0]
    print(f"the other ended {time.monotonic() - begin:.1f} s later:\n{outputs[1 - who]}")
    assert running[who].returncode == 2
    assert f"error (process {who} of 2): " in outputs[who] and "file too large" in outputs[who], outputs[who]
    assert running[1 - who].returncode not in (0, 3)
    assert "another process is gone" in outputs[1 - who] or "another task died" in outputs[1 - who]
    return outputs


@pytest.mark.parametrize("who", [0, 1])
def test_no_room_for_a_checkpoint_is_told_and_the_last_one_is_kept(straight, tmp_path, who):
    running = start(tmp_path / "run")
    wait_for(tmp_path / "run", 10)
    wait_for_checkpoint(tmp_path / "run")
    outputs = run_out_of_room(running, who)
    [whole] = steps(tmp_path / "run")
    assert f"the checkpoint of step {whole} is whole" in outputs[who]
    assert_resumes(tmp_path / "run", straight)


def test_no_room_for_the_last_checkpoint_is_no_wait_for_ever(straight, tmp_path):
    """The others have no step left in which they would notice that one is gone."""
    running = start(tmp_path / "run", train__checkpoint_every=0)
    wait_for(tmp_path / "run", 12)
    outputs = run_out_of_room(running, 1)
    assert "no checkpoint is whole yet" in outputs[1]
    assert steps(tmp_path / "run") == []
    assert_resumes(tmp_path / "run", straight)


def test_processes_with_different_configs_are_refused(tmp_path):
    where = ("--coordinator", f"127.0.0.1:{processes.free_port()}", "--num-processes", "2", "--process-id")
    running = [
        processes.start(tmp_path / "run", 1, 1, CONFIG, {**TINY, "data.seed": seed}, (*where, str(seed)))[0]
        for seed in (0, 1)
    ]
    codes, outputs = processes.finish(running)
    assert 2 in codes and 0 not in codes
    assert any("the config: process 1 has another than process 0" in x for x in outputs)
    assert not (tmp_path / "run").exists()


def test_a_process_that_never_comes_is_told(tmp_path):
    where = ("--coordinator", f"127.0.0.1:{processes.free_port()}", "--num-processes", "2", "--start-timeout", "3")
    for number in ("0", "1"):
        running = processes.start(tmp_path / "run", 1, 1, CONFIG, TINY, (*where, "--process-id", number))
        [code], [output] = processes.finish(running, seconds=120)
        assert code == 2, output
        assert f"process {number} of 2 can't meet the others" in output and "within 3 s" in output
