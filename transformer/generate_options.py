"""The options of `python -m transformer.generate`, and what they can't mean together."""

import argparse
import sys
from typing import NoReturn, get_args

from transformer.settings import DType

FILTERS = ("temperature", "top_k", "top_p", "min_p")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return int(text)


_positive.__name__ = "int"  # what argparse calls it where it is no number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with status 2."""
    parser = _Parser(prog="python -m transformer.generate", description="Continue or answer prompts.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", help="what train.py or convert wrote")
    source.add_argument("--hf", metavar="DIR", help="a Hugging Face directory")
    source.add_argument("--gguf", metavar="FILE", help="a GGUF file, or package:NAME of an installed package")
    parser.add_argument("--tokenizer", help='"bytes" or a tokenizer.json, for --hf (default: that of DIR)')
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--chat", action="store_true", help="answer by the checkpoint's chat template")
    prompts.add_argument("--system", help="the system's message, with --chat")
    prompts.add_argument("--prompt", action="append", default=[], help="text to continue; repeatable")
    prompts.add_argument("--prompt-file", action="append", default=[], help="a file that is a prompt, - for stdin")
    about = 'many prompts: text, one a line, or JSON lines with "prompt" or (--chat) "messages"; - for stdin'
    prompts.add_argument("--prompts", metavar="FILE", help=about)
    about = "JSON lines of --prompts' texts, in their order, written when all are done (stdout)"
    prompts.add_argument("--output", metavar="FILE", help=about)
    prompts.add_argument("--num-samples", type=_positive, default=1, help="texts for each prompt")
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("--max-new-tokens", type=_positive, default=200)
    drawing.add_argument("--temperature", type=float, help="logits are divided by it (1.0); 0 is greedy")
    drawing.add_argument("--top-k", type=int, help="keep the k most probable tokens (0: all)")
    drawing.add_argument("--top-p", type=float, help="keep the smallest set of that probability (1.0: all)")
    drawing.add_argument("--min-p", type=float, help="drop tokens below this fraction of the best one (0.0: none)")
    drawing.add_argument("--greedy", action="store_true", help="always the most probable token")
    about = "logits of tokens that were there before are divided by it (1.0)"
    drawing.add_argument("--repetition-penalty", type=float, default=1.0, help=about)
    drawing.add_argument("--seed", type=int, help="of the random numbers (0)")
    _add_search(drawing)
    drawing.add_argument("--stop", action="append", default=[], help="text that ends the answer; repeatable")
    drawing.add_argument("--no-stream", action="store_true", help="print a text when it is complete")
    about = "the natural log of every token's probability, after the text or in --output"
    drawing.add_argument("--logprobs", action="store_true", help=about)
    _add_running(parser.add_argument_group("running"))
    args = parser.parse_args(argv)
    args.conversation = args.chat and not (args.prompt or args.prompt_file or args.prompts) and sys.stdin.isatty()
    if problem := _contradiction(args):
        parser.error(problem)
    return args


def _add_search(group) -> None:
    about = "search for the most probable text, keeping K at a time, instead of drawing one"
    group.add_argument("--beams", type=_positive, metavar="K", help=about)
    about = "power of the length that divides a text's log probability, with --beams (1.0)"
    group.add_argument("--length-penalty", type=float, metavar="P", help=about)
    about = "when --beams end: with K texts (true), once none looks better (false), once none can be better (never)"
    group.add_argument("--early-stopping", choices=["true", "false", "never"], help=about)


def _add_running(group) -> None:
    group.add_argument("--dtype", choices=get_args(DType), help="of the computation (float32, or the run's)")
    group.add_argument("--weights", choices=["int8"], help="narrow them at load")
    about = "of cached keys and values (that of the computation)"
    group.add_argument("--cache-dtype", choices=["float32", "bfloat16", "int8"], help=about)
    about = "tokens seen by layers that would see all: text of any length in constant memory"
    group.add_argument("--window", type=_positive, metavar="W", help=about)
    group.add_argument("--sinks", type=_positive, metavar="K", help="first tokens that --window keeps in view (4)")
    group.add_argument("--prefill-chunk", type=_positive, metavar="N", help="tokens of a prompt that are read at once")
    group.add_argument("--batch-size", type=_positive, metavar="N", help="prompts that run together")
    about = (
        "a smaller model of the same vocabulary that guesses ahead: a workdir, a Hugging Face directory, a GGUF file; "
    )
    about += "own: the model's own multi-token prediction"
    group.add_argument("--draft", metavar="MODEL", help=about)
    group.add_argument("--draft-tokens", type=_positive, metavar="K", help="guesses of --draft a pass (4)")
    about = "apart: faster tokens on a CPU, longer compilation; auto: apart there for many steps"
    group.add_argument("--layers", choices=["auto", "stacked", "apart"], default="auto", help=about)


def _contradiction(args: argparse.Namespace) -> str | None:
    """What can't be meant by options that are right one by one."""
    chosen = [f"--{name.replace('_', '-')}" for name in FILTERS if getattr(args, name) is not None]
    single = [f"--{name.replace('_', '-')}" for name in ("prompt", "prompt_file", "no_stream") if getattr(args, name)]
    drawing = [*chosen, *(["--greedy"] if args.greedy else []), *(["--seed"] if args.seed is not None else [])]
    watched = {
        "--repetition-penalty": args.repetition_penalty != 1,
        "--stop": args.stop,
        "--draft": args.draft,
        "--num-samples": args.num_samples > 1,
    }
    drawing += [flag for flag, value in watched.items() if value]
    batch = {
        "--beams": args.beams,
        "--batch-size": args.batch_size,
        "--draft": args.draft,
        "--logprobs": args.logprobs,
        "--no-stream": args.no_stream,
    }
    alone = [*(flag for flag, value in batch.items() if value), *(["--num-samples"] if args.num_samples > 1 else [])]
    rules = {
        "give a --prompt, a --prompt-file or --prompts": not (
            args.prompt or args.prompt_file or args.prompts or args.conversation
        ),
        f"--prompts: reads and writes files; leave out {', '.join(single)}": args.prompts and single,
        "--output: needs --prompts": args.output and not args.prompts,
        "--stop: an empty string stops everything; leave it out": "" in args.stop,
        "--system: needs --chat": args.system is not None and not args.chat,
        "--tokenizer: needs --hf; a workdir and a GGUF file bring theirs": args.tokenizer and not args.hf,
        "--sinks: needs --window": args.sinks and not args.window,
        "--draft-tokens: needs --draft": args.draft_tokens and not args.draft,
        "--repetition-penalty: a --draft can't know what it changes": args.draft and args.repetition_penalty != 1,
        "--prefill-chunk: with --draft prompts are read whole": args.draft and args.prefill_chunk,
        f"--beams: finds the most probable text; leave out {', '.join(drawing)}": args.beams and drawing,
        "--length-penalty: needs --beams": args.length_penalty is not None and not args.beams,
        "--early-stopping: needs --beams": args.early_stopping and not args.beams,
        f"--greedy: leaves nothing to {', '.join(chosen)}; give one of them": args.greedy and chosen,
        f"{', '.join(alone)}: not in a conversation; give a --prompt": args.conversation and alone,
    }
    return next((problem for problem, wrong in rules.items() if wrong), None)
