"""Whatever happens to the bytes of a checkpoint: what is restored is what was saved, or the one before, said aloud."""

import errno
import resource
import shutil
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer import distributed, settings, sharding
from transformer.checkpoints import integrity, manager
from transformer.checkpoints.workdir import Workdir, WorkdirError

IDENTITY = {"kind": "bytes"}


def tree(seed: int) -> dict:
    """A state, split over a mesh."""
    rng = np.random.default_rng(seed)
    mesh = sharding.make_mesh(settings.Mesh(data=2, fsdp=4))

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    # What is small, OCDBT keeps in nodes that have checksums. It may write each device's part to a file of its own, as
    # it happens: a part alone is large enough.
    kernel = put(rng.normal(size=(64, 256)).astype(np.float32), "fsdp")
    return {
        "params": {"kernel": kernel, "scale": put(rng.normal(size=7).astype(np.float32))},
        "step": put(np.int32(seed)),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = Workdir(tmp_path_factory.mktemp("saved"))
    for step in (1, 2):
        place.save(step, tree(step), {"position": [step, 10 * step]}, IDENTITY)
        place.wait()
    place.close()
    return place.path


@pytest.fixture
def workdir(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def resume(workdir):
    """(step that was found, what was said), after a look at the arrays."""
    said = []
    state, data = Workdir(workdir).resume(tree(0), IDENTITY, said.append)
    step = int(state["step"])
    assert data == {"position": [step, 10 * step]}
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(tree(step)), strict=True):
        assert np.array_equal(x, y) and x.sharding == y.sharding
    return step, said


def files(workdir):
    return sorted(x for x in (workdir / "checkpoints" / "2").rglob("*") if x.is_file())


def test_the_newest_is_used(workdir):
    assert resume(workdir) == (2, [])


def test_any_flipped_bit_is_harmless_or_noticed(saved, tmp_path):
    """Three in each file. Those in the arrays and in the reader's position must be among what is noticed."""
    rng, noticed = np.random.default_rng(0), set()
    for number, file in enumerate(files(saved)):
        for turn in range(3):
            workdir = tmp_path / f"{number}-{turn}"
            shutil.copytree(saved, workdir)
            target = workdir / file.relative_to(saved)
            content = bytearray(target.read_bytes())
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
            target.write_bytes(content)
            step, said = resume(workdir)
            assert (step, len(said)) in ((2, 0), (1, 1))
            if said:
                assert "step 2 is damaged" in said[0] and "using that of step 1" in said[0]
                assert (workdir / "damaged" / "2").is_dir() and not (workdir / "checkpoints" / "2").exists()
                noticed.add(file.relative_to(saved))
    assert {"state", "data", "identity", "checksums"} <= {file.parts[2] for file in noticed}
    largest = max(files(saved), key=lambda file: file.stat().st_size)
    assert largest.relative_to(saved) in noticed and largest.stat().st_size > 10_000


def test_numbers_that_changed_on_the_disk_are_noticed_by_their_sum(saved):
    """Orbax would hand them out: what it reads back is no error, only another number."""
    folder = saved / "checkpoints" / "2"
    seal, _ = integrity.read_texts(folder, ())
    sums = integrity.sums(integrity.read_arrays(folder, tree(0)))
    integrity.verify(sums, seal)
    for name in sums:
        with pytest.raises(integrity.DamagedError, match=f"{name}: differs"):
            integrity.verify({**sums, name: sums[name][:-1] + ("0" if sums[name][-1] != "0" else "1")}, seal)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-9])])
def test_lost_or_cut_files_are_noticed(workdir, damage):
    for file in files(workdir):
        if file.parent.name == "d":  # where OCDBT keeps data
            damage(file)
    assert resume(workdir)[0] == 1


def test_the_next_save_of_that_step_is_kept(workdir):
    (workdir / "checkpoints" / "2" / "data" / "metadata").write_text("{")
    assert resume(workdir)[0] == 1
    place = Workdir(workdir)
    place.save(2, tree(2), {"position": [2, 20]}, IDENTITY)
    place.close()
    assert resume(workdir) == (2, [])


def test_where_all_are_damaged_nothing_is_moved(workdir):
    for step in ("1", "2"):
        (workdir / "checkpoints" / step / "data" / "metadata").write_text("{}")
    with pytest.raises(WorkdirError, match=r"no checkpoint can be read \(step 2: .*data.*; step 1: "):
        resume(workdir)
    assert {x.name for x in (workdir / "checkpoints").iterdir() if x.is_dir()} == {"1", "2"}


def test_parameters_alone_are_verified_too_and_nothing_is_moved(workdir):
    (workdir / "checkpoints" / "2" / "checksums" / "metadata").write_text("{}")
    said = []
    like = tree(0)["params"]
    found = Workdir(workdir).restore_params(like, said.append)
    assert np.array_equal(found["kernel"], tree(1)["params"]["kernel"]) and len(said) == 1
    assert (workdir / "checkpoints" / "2").is_dir()
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=x.sharding), like)
    assert Workdir(workdir).restore_params(half, said.append)["scale"].dtype == "bfloat16"


def test_checkpoints_without_a_seal_are_used(workdir, caplog):
    shutil.rmtree(workdir / "checkpoints" / "2" / "checksums")
    assert resume(workdir) == (2, [])


def test_no_room_is_told_from_other_errors(workdir):
    place = Workdir(workdir)
    wrapped = ValueError("tensorstore: write failed: No space left on device [/x]")
    told = r"no space left on device.*checkpoint of step 2 is whole.*resumes"
    for error in (OSError(errno.ENOSPC, "?"), wrapped, RuntimeError("save failed")):
        error.__cause__ = wrapped if isinstance(error, RuntimeError) else None
        with pytest.raises(WorkdirError, match=told), place.writing():
            raise error
    with pytest.raises(RuntimeError, match="another"), place.writing():
        raise RuntimeError("another")


def save_without_room(place):
    """Saves step 3 where no file may grow beyond 2 kB, and goes on as a run does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        place.save(3, tree(3), {"position": [3, 30]}, IDENTITY)
        for _ in range(1000):
            place.check()
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_found_no_room_is_told_and_not_waited_for(workdir):
    told = r"can't be written \(file too large\); the checkpoint of step 2 is whole"
    with pytest.raises(WorkdirError, match=told):
        save_without_room(Workdir(workdir))
    assert resume(workdir) == (2, [])


def test_who_has_failed_in_a_save_meets_nobody(monkeypatch):
    met = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "barrier", lambda key, timeout_ms: met.append((key, timeout_ms)))

    def save(error: Exception | None = None):
        try:
            if error:
                raise error
        finally:  # where Orbax meets the others
            manager._meet_unless_failed(key=str(error), timeout_ms=5)

    save()
    with pytest.raises(OSError, match="no room"):
        save(OSError("no room"))
    save()
    assert met == [("None", 5)] * 2
