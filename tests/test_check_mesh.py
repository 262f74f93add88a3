"""`python -m transformer.check_mesh` as people call it: what it says, and how it ends."""

import jax
import pytest

from transformer import check_mesh
from transformer.training.meshes import Difference, Verdict


def a_verdict(**fields) -> Verdict:
    worst = {"metrics": Difference(1e-7, "loss", "data=8"), "gradients": Difference(3e-6, "embedding/token", "fsdp=8")}
    worst["corrections"] = Difference()
    return Verdict(**{"family": "gpt2", "same": ["data=8", "fsdp=8"], "leaves": 20, "worst": worst, **fields})


@pytest.mark.parametrize(
    ("verdict", "status", "words"),
    [
        (a_verdict(), 0, ["gpt2", "same", "1.0e-07 loss", "3.0e-06", "embedding/token"]),
        (a_verdict(wrong=["tensor=2,data=4"]), 1, ["DIFFERS", "gpt2: tensor=2,data=4 DIFFERS from one device"]),
        (a_verdict(same=[], refused={"tensor=8": "heads=4"}), 1, ["nothing compared", "tensor=8 refused: heads=4"]),
        (a_verdict(refused={"tensor=8": "no", "tensor=4": "no"}), 0, ["tensor=8, tensor=4 refused: no"]),
    ],
)
def test_the_table_and_the_exit_status_tell_the_verdict(monkeypatch, capsys, verdict, status, words):
    monkeypatch.setattr(check_mesh, "check", lambda *_: [verdict])
    assert check_mesh.main([]) == status
    told = capsys.readouterr().out
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "gpt5"], "config='gpt5': unknown; use one of bert"),
        (["--meshes", "fsdp=3"], "--meshes='fsdp=3': sizes multiply to 3; use --devices=3, or other sizes"),
        (["--meshes", "fsd=8"], "'fsd=8' is no AXIS=SIZE with a further axis of slice, data, fsdp"),
        (["--meshes", "fsdp=2,fsdp=4"], "'fsdp=4' is no AXIS=SIZE"),
        (["--meshes", "fsdp=many"], "'fsdp=many' is no AXIS=SIZE"),
        (["--devices", "1"], "--devices=1: use at least 2"),
        (["--devices", "16", "--meshes", "data=16"], "--devices=16: there are 8 of cpu; use --devices=8, or"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, message):
    jax.devices()  # what has started can have no more devices
    assert check_mesh.main(arguments) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.startswith("error: ") and not told.out


def test_a_mesh_is_read_in_the_order_of_its_axes():
    assert list(check_mesh.parse_mesh("tensor=2,data=4,fsdp=1", 8).items()) == [("data", 4), ("tensor", 2)]
