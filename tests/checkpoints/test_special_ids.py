"""An exported config states which tokens begin, end and pad a text, or that none does: readers would guess else."""

import json
from pathlib import Path

import pytest

import transformer
from tests.checkpoints import common as golden
from transformer.checkpoints import hugging_face
from transformer.checkpoints.tensors import CheckpointError
from transformer.tokenizer import ByteTokenizer


class TwoEnds(ByteTokenizer):
    end_ids = (2, 9)
    bos_id = None


def exported(directory: Path, **options) -> tuple[dict, dict | None]:
    """(the special ids of config.json, generation_config.json if there is one) of an export."""
    model, params = golden.imported(golden.PLAIN)
    transformer.to_hf(model, params, directory, **options)
    config, file = hugging_face.read_config(directory), directory / "generation_config.json"
    ids = {name.removesuffix("_token_id"): config[name] for name in hugging_face.SPECIAL_IDS}
    return ids, json.loads(file.read_text()) if file.exists() else None


def test_nothing_known_is_null(tmp_path):
    """Absent, they would be the class's defaults: a text of another tokenizer would end at its token 2."""
    assert exported(tmp_path / "out") == (dict(bos=None, eos=None, pad=None), None)


def test_a_tokenizer_states_them(tmp_path):
    assert exported(tmp_path / "bytes", tokenizer=ByteTokenizer()) == (
        dict(bos=1, eos=2, pad=0),
        dict(bos_token_id=1, eos_token_id=2, pad_token_id=0),
    )
    assert exported(tmp_path / "ends", tokenizer=TwoEnds()) == (
        dict(bos=None, eos=[2, 9], pad=0),
        dict(eos_token_id=[2, 9], pad_token_id=0),
    )


def test_files_beside_it_have_the_last_word(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "pad_token_id": 6, "top_k": 5}))
    ids, generation = exported(tmp_path / "one", tokenizer=ByteTokenizer(), companions=source)
    assert ids == dict(bos=1, eos=[7, 8], pad=6)
    assert generation == {"eos_token_id": [7, 8], "pad_token_id": 6, "top_k": 5}
    (source / "config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": 0, "pad_token_id": None}))
    assert exported(tmp_path / "two", tokenizer=ByteTokenizer(), companions=source)[0] == dict(bos=0, eos=7, pad=6)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_files_that_are_none_are_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not a JSON object"):
        exported(tmp_path / "out", companions=tmp_path)
    assert not (tmp_path / "out").exists()
