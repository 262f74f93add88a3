"""Trains a config, or resumes it.

    python train.py --config configs/llama3.py:mini --workdir runs/mini --config.train.steps=500

Any field of the config can be set on the command line as --config.group.field=value. The same command resumes from
the newest checkpoint of the workdir. Fine-tuning starts from published parameters:

    python train.py --init-from HF_DIR --workdir runs/tuned --config.optimizer.peak_lr=3e-5

Several hosts run the same command each (docs/launch.md). TPU slices, Slurm and Open MPI say who is who; elsewhere
--coordinator, --num-processes and --process-id do.
"""

from transformer import huge_pages

if __name__ == "__main__":
    huge_pages.begin_again()  # before anything is loaded that would have to be loaded again

import argparse
import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging as absl_logging

from transformer import distributed
from transformer.checkpoints import source as sources
from transformer.checkpoints.gguf import PACKAGE
from transformer.checkpoints.tensors import CheckpointError
from transformer.checkpoints.workdir import WorkdirError
from transformer.config import Run, load_config, override, resolve
from transformer.distributed import DistributedError
from transformer.generation import exact_match, generate_text
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.planning.accounting import flops_per_token
from transformer.settings import SettingsError, check
from transformer.sharding import ShardingError
from transformer.spec import SpecError
from transformer.tokenizer import Tokenizer
from transformer.training.guard import SkippedError
from transformer.training.loop import train
from transformer.training.profile import parse_window
from transformer.training.replicas import ReplicaError

MISTAKES = (
    SettingsError, SpecError, ShardingError, WorkdirError, CheckpointError, DistributedError, ReplicaError,
    SkippedError,
)  # fmt: skip


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """The flags, and the overrides (field, text) that --config.group.field=value gives."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Any field of the config can be set: --config.train.steps=500 --config.mesh.fsdp=4. "
        "The same command resumes from the newest checkpoint of the workdir.",
    )
    parser.add_argument(
        "--config",
        default="configs/llama3.py:mini",
        help="FILE.py[:size] or FAMILY[:size], and fields behind it: llama3:mini,train.steps=100; or a run's "
        "config.json (%(default)s)",
    )
    parser.add_argument(
        "--init-from",
        metavar="DIR",
        help="fine-tune: the model, its parameters and by default its tokenizer come from this Hugging Face "
        "directory (or training workdir), everything else from the config",
    )
    parser.add_argument("--workdir", required=True, help="directory of the run: checkpoints, metrics, config")
    parser.add_argument(
        "--profile", metavar="steps=A:B", help="record steps A to B with JAX's profiler, into the workdir's profile/"
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    hosts = parser.add_argument_group("several processes", "one on each host; docs/launch.md")
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 is to be met")
    hosts.add_argument("--num-processes", type=int, metavar="N")
    hosts.add_argument("--process-id", type=int, metavar="I", help="0 to N - 1")
    seconds = dict(type=int, metavar="SECONDS")
    hosts.add_argument(
        "--start-timeout", default=distributed.START_SECONDS, **seconds, help="to wait for all to come (%(default)s)"
    )
    hosts.add_argument(
        "--heartbeat-timeout", default=distributed.HEARTBEAT_SECONDS, **seconds,
        help="after which a silent process is dead, and all end (%(default)s)",
    )  # fmt: skip
    plain, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if argument.startswith("--config."):
            name, equals, text = argument.removeprefix("--config.").partition("=")
            overrides.append((name, text if equals else next(rest, "")))
        else:
            plain.append(argument)
    return parser.parse_args(plain), overrides


def start_from(name: str, values: dict[str, Any], overrides: list[tuple[str, str]]) -> None:
    """Makes a config that of a fine-tuning run: the model and the tokenizer of the source, and a record of it.

    Raises:
      SettingsError, CheckpointError, WorkdirError: a source that can't be used, or an override of its model.
    """
    for field, text in overrides:
        if field.partition(".")[0] == "model":
            raise SettingsError(f"{field}={text!r}: --init-from brings the model; leave it out")
    if name.startswith(PACKAGE) or name.endswith(".gguf"):
        command = f"python -m transformer.convert from-gguf {name} OUT"
        raise SettingsError(f"--init-from {name!r}: convert it first: {command}")
    source = sources.open_source(name)
    values["model"], values["init_from"] = sources.model_values(source.spec), sources.record(source)
    values["data"]["tokenizer"] = source.tokenizer_name()


def sampler(run: Run):
    """Text from the run's prompts, with its sampling settings."""
    t = run.settings.train

    def sample(model: Transformer, params: dict, tokenizer: Tokenizer) -> str:
        texts = generate_text(
            model,
            params,
            tokenizer,
            list(t.sample_prompts),
            max_new_tokens=t.sample_tokens,
            sampling=Sampling(temperature=t.sample_temperature),
            seed=run.settings.seed,
        )
        return "\n".join(f"  {prompt}{text}" for prompt, text in zip(t.sample_prompts, texts, strict=True))

    return sample


def run_flags(flags: argparse.Namespace, overrides: list[tuple[str, str]], log: logging.Logger) -> None:
    """Meets the other processes and trains."""
    check(bool(flags.workdir.strip()), "--workdir", flags.workdir, "name a directory, such as runs/mini")
    values = load_config(flags.config).to_dict()
    if flags.init_from:
        start_from(flags.init_from, values, overrides)
    for name, text in overrides:
        override(values, name, text)
    run, profile = resolve(values), parse_window(flags.profile) if flags.profile else None
    timeouts = dict(start_seconds=flags.start_timeout, heartbeat_seconds=flags.heartbeat_timeout)
    distributed.join(flags.coordinator, flags.num_processes, flags.process_id, **timeouts)
    if jax.process_index() > 0:
        log.setLevel(logging.CRITICAL)

    def count_flops(length: int, source: int | None) -> float:
        return flops_per_token(run.spec, length, training=True, source_len=source).total

    hooks = dict(count_flops=count_flops, sampler=sampler(run), matcher=exact_match)
    result = train(run, flags.workdir, **hooks, profile=profile, quiet=flags.quiet)
    if not flags.quiet and result.finished and jax.process_index() == 0:
        print(f"done: {flags.workdir}")


@contextlib.contextmanager
def log_on_stderr(quiet: bool) -> Iterator[logging.Logger]:
    """What the package logs goes to stderr meanwhile; if quiet, errors alone."""
    absl_logging.set_verbosity(absl_logging.WARNING)  # orbax tells every step of a save
    log, handler = logging.getLogger("transformer"), logging.StreamHandler()
    before = log.propagate, log.level
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.INFO)
    try:
        yield log
    finally:
        log.removeHandler(handler)
        log.propagate, log.level = before


def main(arguments: list[str]) -> int:
    """Runs; a mistake of the user's is one line on stderr and exit code 2, a lost process one line and 1."""
    flags, overrides = parse(arguments)
    try:
        with log_on_stderr(flags.quiet) as log:
            run_flags(flags, overrides, log)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except MISTAKES as error:
        print(f"error{distributed.label()}: {error}", file=sys.stderr)
        code = 2
    except Exception as error:
        if not distributed.joined():
            raise
        code = distributed.LOST
        why = distributed.explain_loss(error)
        if why is None:
            traceback.print_exc()
        else:
            print(f"error{distributed.label()}: {why}", file=sys.stderr)
    return distributed.leave(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
