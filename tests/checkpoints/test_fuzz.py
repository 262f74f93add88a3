"""Whatever a file says, it is understood or refused with an error of ours: seeded nonsense in every place."""

import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest

import transformer
from tests.checkpoints import common as golden
from transformer import families, settings, sharding
from transformer.checkpoints import hugging_face, tensors, weights
from transformer.checkpoints.tensors import CheckpointError
from transformer.nn.model import Transformer
from transformer.settings import SettingsError
from transformer.spec import SpecError

NONSENSE = (
    golden.ABSENT,
    None,
    "x",
    -1,
    0,
    3,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    True,
    [],
    ["x", 2],
    {},
    {"x": 1},
)


@pytest.mark.parametrize("case", golden.CASES)
def test_any_field_of_any_config_may_be_nonsense(case):
    """Left out or replaced: understood, or refused with an error of ours."""
    plain = golden.config(case)
    paths = [(name,) for name in plain]
    paths += [(name, inner) for name, value in plain.items() if isinstance(value, dict) for inner in value]
    for path in paths:
        for value in NONSENSE:
            config = json.loads(json.dumps(plain))
            inside = config if len(path) == 1 else config[path[0]]
            inside.pop(path[-1])
            if value is not golden.ABSENT:
                inside[path[-1]] = value
            if isinstance(config.get("model_type"), str):
                outcome(lambda config=config: hugging_face.read_spec(config), f"{path} = {value!r}")


def outcome(call, what: str) -> bool:
    """True if it worked, False if it was refused; any other error fails the test."""
    try:
        call()
    except (CheckpointError, SettingsError, SpecError):
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return True


def mutate(rng: random.Random, content: bytes, begin: int, end: int) -> bytes:
    """Flips, replaces, drops, doubles or inserts a few bytes between begin and end."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(begin, min(end, len(data)))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(b'0123456789[]{},:"-eFIU\\')
            case 2:
                del data[at]
            case 3:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            case 4:
                data[at:at] = rng.randbytes(1)
    return bytes(data)


@pytest.mark.parametrize("case", [golden.PLAIN, *golden.FEW_BITS])
def test_mutated_weights(case, tmp_path):
    """The header of the safetensors file, its length included."""
    rng, directory, model = random.Random(0), golden.copy(case, tmp_path / "model"), golden.imported(case)[0]
    content = (directory / golden.WEIGHTS).read_bytes()
    end = golden.HEADER + int.from_bytes(content[: golden.HEADER], "little")
    read = reader(model, directory)
    worked = 0
    for i in range(300):
        # Two in three leave the length alone, else hardly any would get past it.
        damaged = mutate(rng, content, golden.HEADER if i % 3 else 0, end)
        if i % 3 == 1:
            new = end - golden.HEADER + len(damaged) - len(content)
            damaged = new.to_bytes(golden.HEADER, "little") + damaged[golden.HEADER :]
        (directory / golden.WEIGHTS).write_bytes(damaged)
        worked += outcome(read, f"mutation {i}")
    assert worked < 150


def reader(model: Transformer, directory: Path):
    """Reads all tensors of a directory into `model`, whose shapes are made once."""
    table = families.get(model.spec.origin.family).table(model.spec)
    mesh = sharding.make_mesh(settings.Mesh(), jax.devices()[:1])
    like = transformer.init(model, mesh=mesh, abstract=True)

    def read():
        files = tensors.TensorFiles(directory, tensors.block_of(hugging_face.read_config(directory)))
        weights.load(files, table, model.spec, like, np.dtype("float32"), lambda path, count: None)

    return read


def test_mutated_index(tmp_path):
    rng, model = random.Random(1), golden.imported(golden.PLAIN)[0]
    directory = golden.copy(golden.PLAIN, tmp_path / "model")
    golden.shard(directory)
    content = (directory / golden.INDEX).read_bytes()
    read, worked = reader(model, directory), 0
    for i in range(200):
        (directory / golden.INDEX).write_bytes(mutate(rng, content, 0, len(content)))
        worked += outcome(read, f"mutation {i}")
    assert worked < 100


@pytest.mark.parametrize("case", golden.CASES)
def test_mutated_config(case, tmp_path):
    rng, file = random.Random(2), tmp_path / "config.json"
    content = (golden.GOLDEN / case / "config.json").read_bytes()
    for i in range(200):
        file.write_bytes(mutate(rng, content, 0, len(content)))
        outcome(lambda: hugging_face.read_spec(hugging_face.read_config(tmp_path)), f"mutation {i}")
