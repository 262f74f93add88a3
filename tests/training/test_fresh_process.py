"""A process that knows nothing but the settings and a checkpoint's position goes on with the very batches."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.mapping import from_mapping
from transformer.settings import Data
from transformer.tokenizer import ByteTokenizer
from transformer.training import data
from transformer.training.examples import Shape

ROOT, BEFORE, AFTER = Path(__file__).parents[2], 25, 30


def digests(values: dict, state: dict | None, count: int) -> tuple[list[str], list[dict]]:
    """Of each of the next batches, and the state before it."""
    found, states = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "WINDOW_TOKENS", 16 * 64)  # several windows of rows that are shuffled
        batches = data.train_iterator(from_mapping(Data, values, "data."), ByteTokenizer(), Shape(False, True, 264))
    try:
        if state is not None:
            batches.set_state(state)
        for _ in range(count):
            states.append(batches.get_state())
            batch = next(batches)
            found.append(hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest())
    finally:
        batches.close()
    return found, states


def in_a_fresh_process(values: dict, state: dict, folder: Path) -> list[str]:
    asked = folder / "asked.json"
    asked.write_text(json.dumps([values, state, AFTER]))
    code = (
        "import json, sys\n"
        "from tests.training.test_fresh_process import digests\n"
        "print(json.dumps(digests(*json.load(open(sys.argv[1])))[0]))\n"
    )
    # Hashes of texts differ between processes of Python: no order may come of them.
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(asked)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("objective", ["prefix", pytest.param("causal", marks=pytest.mark.slow)])
def test_a_position_is_all_that_a_fresh_process_needs(objective, tmp_path):
    """With workers, a weighed mixture of which a part has ended and one is in its second epoch, packing, shuffling."""
    rng = random.Random(0)
    for name, letters, lines, length in (("a", "abcde ", 60, 90), ("b", "0123456789", 40, 30), ("c", "XYZ", 30, 20)):
        texts = ["".join(rng.choices(letters, k=rng.randint(5, length))) for _ in range(lines)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    parts = [
        dict(paths=[f"{tmp_path}/{name}.jsonl"], weight=weight, epochs=epochs)
        for name, weight, epochs in (("a", 3, None), ("b", 2, 3), ("c", 1, 1))
    ]
    values = dict(
        source="mixture", mixture=parts, objective=objective, seq_len=64, batch_size=4, validation_fraction=0.2,
        workers=1,
    )  # fmt: skip
    straight, states = digests(values, None, BEFORE + AFTER)
    assert len(set(straight)) == BEFORE + AFTER
    assert in_a_fresh_process({**values, "workers": 2}, states[BEFORE], tmp_path) == straight[BEFORE:]
