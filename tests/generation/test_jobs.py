"""`--prompts` and `--output`: what is read, what is written where and when, and which line is at fault."""

import io
import json
import os
import sys

import pytest

from tests import common
from tests.generation.common import GREEDY, stand_in
from transformer import api, chat, generation
from transformer.chat import ChatTemplate
from transformer.generate import main
from transformer.generation import jobs
from transformer.tokenizer import ByteTokenizer

FAMILY = "llama3"
TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>", {})
PROMPTS = ["The ", "A longer prompt than the others, in another bucket: ", "é"]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command line on the tiny model and a tiny template; gives (status, stdout, stderr)."""
    loaded = common.model(FAMILY), common.params(FAMILY), ByteTokenizer()
    stand_in(monkeypatch, loaded)
    monkeypatch.setattr(chat, "load_template", lambda directory: TEMPLATE)

    def run(*arguments):
        status = main(["--workdir", "w", "--max-new-tokens", "6", "--layers", "stacked", *arguments])
        return status, *capsys.readouterr()

    return run


def want(prompts, **options):
    model, params = common.model(FAMILY), common.params(FAMILY)
    options = {"max_new_tokens": 6, "sampling": GREEDY, **options}
    return generation.complete(model, params, ByteTokenizer(), prompts, **options)


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_are_answered_in_their_order(cli, tmp_path):
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, "id": i}) for i, prompt in enumerate(PROMPTS)) + "\n\n")
    out.write_text("old")
    flags = ("--prompts", str(file), "--output", str(out), "--greedy")
    status, shown, err = cli(*flags, "--batch-size", "1", "--logprobs")
    assert (status, shown) == (0, "") and "3 prompts, " in err and "first batch after" in err
    got, texts = records(out.read_text()), want(PROMPTS)
    for i, (record, text) in enumerate(zip(got, texts, strict=True)):
        assert record.pop("logprobs") == pytest.approx(text.logprobs, abs=1e-3)
        assert record == {
            "prompt": PROMPTS[i], "id": i, "text": text.text, "tokens": list(text.tokens), "reason": text.reason
        }  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "p.jsonl"]
    assert out.stat().st_mode & 0o777 == file.stat().st_mode & 0o777
    cli(*flags)
    assert not any("logprobs" in record for record in records(out.read_text()))


def test_plain_lines_are_prompts_and_stdout_takes_their_texts(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The \r\n\né\n"))
    status, out, _ = cli("--prompts", "-", "--greedy", "--num-samples", "2")
    assert status == 0
    assert [record["prompt"] for record in records(out)] == ["The ", "The ", "é", "é"]
    assert [record["text"] for record in records(out)] == [t.text for t in want(["The ", "The ", "é", "é"])]


def test_messages_and_prompts_are_written_by_the_template(cli, tmp_path):
    file = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    file.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "d"}))
    status, out, _ = cli("--prompts", str(file), "--greedy", "--chat", "--system", "S")
    assert status == 0
    texts = want(["<s>S<u>a<a>b<u>c<a>", "<s>S<u>d<a>"], bos=False)
    assert [record["text"] for record in records(out)] == [text.text for text in texts]


SYSTEM = '{"messages": [{"role": "system", "content": "x"}]}'
# (message, the lines after a good one, flags)
BAD = [
    ("line 2: Expecting value", ["nonsense"], []),
    ("line 2: expected an object", ["3"], []),
    ('line 2: expected an object with either "prompt" or "messages"', ["{}"], []),
    ('line 3: expected an object with either "prompt" or "messages"', ["", '{"prompt": "a", "messages": []}'], []),
    ('line 2: "prompt" is 3; give it text', ['{"prompt": 3}'], []),
    ('line 2: "messages" need --chat', ['{"messages": [{"role": "user", "content": "x"}]}'], []),
    ('line 2: "messages" must be a list', ['{"messages": []}'], ["--chat"]),
    ('line 2: "messages" must be a list of objects', ['{"messages": [{"role": "user"}]}'], ["--chat"]),
    ("line 2: brings a system's message; leave out --system", [SYSTEM], ["--chat", "--system", "S"]),
]


@pytest.mark.parametrize(("message", "lines", "flags"), BAD)
def test_a_bad_line_is_named_before_anything_is_loaded(cli, tmp_path, monkeypatch, message, lines, flags):
    monkeypatch.setattr(api, "load", lambda workdir: pytest.fail("weights were read"))
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(['{"prompt": "good"}', *lines]))
    status, out, err = cli("--prompts", str(file), *flags)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: --prompts {file}: {message}") and err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_known_before_anything_is_loaded(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load", lambda workdir: pytest.fail("weights were read"))
    (tmp_path / "p").write_text("a")
    (tmp_path / "empty").write_text("\n")
    assert "has no prompts" in cli("--prompts", str(tmp_path / "empty"))[2]
    for name in (tmp_path, tmp_path / "nowhere" / "out"):
        status, _, err = cli("--prompts", str(tmp_path / "p"), "--output", str(name))
        assert status == 2 and f"--output {name}: can't be written" in err and err.count("\n") == 1


def test_what_fails_leaves_the_old_output_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    out.write_text("old")

    def fail():
        with jobs.replacing(str(out)) as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert out.read_text() == "old" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("system", [None, "S"])
def test_a_conversation_goes_on_and_compiles_once(cli, monkeypatch, system):
    said = iter(["Hello", "", "And then?", "More!"])

    def listen(_):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", listen)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    status, out, err = cli("--chat", "--greedy", "--prefill-chunk", "16", *(["--system", system] if system else []))
    assert status == 0
    lines = [line for line in err.splitlines() if " tokens in " in line]
    assert len(lines) == 3
    assert ["nothing compiled" in line for line in lines[1:]] == [True, True]
    prompt, answers = f"<s>{system}" if system else "", []
    for turn in ("Hello", "And then?", "More!"):
        prompt += f"<u>{turn}<a>"
        [text] = want([prompt], bos=False)
        answers.append(text.text)
        prompt += text.text
    assert out == "".join(answer + "\n" for answer in answers) + "\n"


@pytest.mark.parametrize("flag", [["--logprobs"], ["--batch-size", "2"], ["--num-samples", "2"], ["--no-stream"]])
def test_a_conversation_refuses_what_it_cannot_do(cli, monkeypatch, capsys, flag):
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    with pytest.raises(SystemExit):
        cli("--chat", *flag)
    assert f"error: {flag[0]}: not in a conversation" in capsys.readouterr().err
