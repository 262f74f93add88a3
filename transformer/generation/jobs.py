"""Many prompts from a file, and what they were continued with into another one."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer.generation.meter import Meter
from transformer.generation.text import Text, complete


def read_text(name: str, flag: str) -> str:
    """The content of a UTF-8 file, or of stdin where the name is "-".

    Raises:
      ValueError: it can't be read, or is no text; named by the flag that gave it.
    """
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        remedy = "give the path of a text file, or - for stdin"
        raise ValueError(f"{flag} {name}: can't be read ({error.strerror}); {remedy}") from error


def read_jobs(name: str, chat: bool) -> dict[int, dict[str, Any]]:
    """The prompts of a file by line number; where its first line is a JSON object, of JSON lines, else of plain ones.

    Empty lines are skipped. Every value has "prompt", or "messages" in a chat; other fields of a JSON line are kept.

    Raises:
      ValueError: naming the line that is no prompt.
    """
    lines = enumerate(read_text(name, "--prompts").split("\n"), start=1)
    lines = {number: line.removesuffix("\r") for number, line in lines if line.strip()}
    if not lines:
        raise ValueError(f"--prompts {name}: has no prompts; write one a line")
    if not next(iter(lines.values())).lstrip().startswith("{"):
        return {number: {"prompt": line} for number, line in lines.items()}
    jobs = {}
    for number, line in lines.items():
        try:
            jobs[number] = _job(json.loads(line), chat)
        except ValueError as error:
            raise ValueError(f"--prompts {name}: line {number}: {error}") from None
    return jobs


def _job(values: Any, chat: bool) -> dict[str, Any]:
    if not isinstance(values, dict) or ("prompt" in values) == ("messages" in values):
        raise ValueError('expected an object with either "prompt" or "messages"')
    if "prompt" in values:
        if not isinstance(values["prompt"], str):
            raise ValueError(f'"prompt" is {values["prompt"]!r}; give it text')
        return values
    if not chat:
        raise ValueError('"messages" need --chat')
    messages = values["messages"]
    good = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not good or not all(isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    return values


def complete_all(loaded: tuple, prompts: list[str], **options: Any) -> list[Text]:
    """`complete` of (model, parameters, tokenizer), with a bar and the time left on a terminal, and a last line."""
    console, total = Console(stderr=True), len(prompts)
    columns = TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with Meter() as meter, bar:
        task = bar.add_task("", total=total, speed="")

        def show(done: int, tokens: int) -> None:
            meter.mark()
            bar.update(task, completed=done, speed=f"{tokens} tokens")

        texts = complete(*loaded, prompts, on_batch=show, **options)
    print(meter.report(sum(len(text.tokens) for text in texts), total), file=sys.stderr)
    return texts


def write_jobs(out: IO[str], jobs: list[dict[str, Any]], texts: list[Text], logprobs: bool) -> None:
    """One JSON line for each job: what it said, then text, tokens, reason and, if wanted, logprobs."""
    for job, text in zip(jobs, texts, strict=True):
        record = {**job, "text": text.text, "tokens": text.tokens, "reason": text.reason}
        if logprobs:
            record["logprobs"] = [round(value, 6) for value in text.logprobs]
        print(json.dumps(record, ensure_ascii=False), file=out)


@contextlib.contextmanager
def replacing(name: str | None) -> Iterator[IO[str]]:
    """A file that takes the place of `name` once it is complete, and vanishes if it isn't; None is stdout.

    Raises:
      ValueError: nothing can be written there, known before there is anything to write.
    """
    if name is None:
        yield sys.stdout
        return
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    except OSError as error:
        raise ValueError(f"--output {name}: can't be written ({error.strerror}); give a file in a directory") from error
    try:
        with open(handle, "w", encoding="utf-8") as file:
            yield file
        # mkstemp makes files that nobody else may read.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
