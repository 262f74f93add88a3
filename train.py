"""Trains a config, or resumes it.

    python train.py --config configs/llama3.py:mini --workdir runs/mini --config.train.steps=500

Any field of the config can be set on the command line as --config.group.field=value. The same command resumes from
the newest checkpoint of the workdir.
"""

import argparse
import logging
import sys

import jax
from absl import logging as absl_logging

from transformer.checkpoints.workdir import WorkdirError
from transformer.config import Run, load_config, override, resolve
from transformer.generation import generate_text
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.planning.accounting import flops_per_token
from transformer.settings import SettingsError
from transformer.sharding import ShardingError
from transformer.spec import SpecError
from transformer.tokenizer import Tokenizer
from transformer.training.loop import train

MISTAKES = (SettingsError, SpecError, ShardingError, WorkdirError)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """The flags, and the overrides (field, text) that --config.group.field=value gives."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Any field of the config can be set: --config.train.steps=500 --config.mesh.fsdp=4. "
        "The same command resumes from the newest checkpoint of the workdir.",
    )
    parser.add_argument(
        "--config", default="configs/llama3.py:mini", help="FILE.py[:size] or FAMILY[:size] (%(default)s)"
    )
    parser.add_argument("--workdir", required=True, help="directory of the run: checkpoints, metrics, config")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    plain, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if argument.startswith("--config."):
            name, equals, text = argument.removeprefix("--config.").partition("=")
            overrides.append((name, text if equals else next(rest, "")))
        else:
            plain.append(argument)
    return parser.parse_args(plain), overrides


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


def main(arguments: list[str]) -> int:
    """Runs; a mistake of the user's is one line on stderr and exit code 2."""
    flags, overrides = parse(arguments)
    absl_logging.set_verbosity(absl_logging.WARNING)  # orbax tells every step of a save
    log = logging.getLogger("transformer")
    log.addHandler(logging.StreamHandler())
    log.propagate = False
    log.setLevel(logging.ERROR if flags.quiet else logging.INFO)
    try:
        values = load_config(flags.config).to_dict()
        for name, text in overrides:
            override(values, name, text)
        run = resolve(values)
        flops = flops_per_token(run.spec, run.settings.data.seq_len, training=True).total
        result = train(run, flags.workdir, flops_per_token=flops, sampler=sampler(run), quiet=flags.quiet)
    except MISTAKES as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not flags.quiet and result.finished and jax.process_index() == 0:
        print(f"done: {flags.workdir}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
