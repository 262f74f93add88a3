"""Trains a config, or resumes it.

    python train.py --config configs/llama3.py:mini --workdir runs/mini --config.train.steps=500

Any field of the config can be set on the command line as --config.group.field=value. The same command resumes from
the newest checkpoint of the workdir.
"""

import logging
import sys

import jax
from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from transformer.checkpoints.workdir import WorkdirError
from transformer.config import Run, resolve
from transformer.generation import generate_text
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.planning.accounting import flops_per_token
from transformer.settings import SettingsError
from transformer.sharding import ShardingError
from transformer.spec import SpecError
from transformer.tokenizer import Tokenizer
from transformer.training.loop import train

CONFIG = config_flags.DEFINE_config_file("config", "configs/llama3.py:mini", "config page, FILE.py[:size]")
WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run: checkpoints, metrics, config", required=True)
QUIET = flags.DEFINE_bool("quiet", False, "print errors only")

MISTAKES = (SettingsError, SpecError, ShardingError, WorkdirError)


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


def main(_) -> int:
    """Runs; a mistake of the user's is one line on stderr and exit code 2."""
    absl_logging.set_verbosity(absl_logging.WARNING)  # orbax tells every step of a save
    log = logging.getLogger("transformer")
    log.addHandler(logging.StreamHandler())
    log.propagate = False
    log.setLevel(logging.ERROR if QUIET.value else logging.INFO)
    try:
        run = resolve(CONFIG.value)
        flops = flops_per_token(run.spec, run.settings.data.seq_len, training=True).total
        result = train(run, WORKDIR.value, flops_per_token=flops, sampler=sampler(run), quiet=QUIET.value)
    except MISTAKES as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not QUIET.value and result.finished and jax.process_index() == 0:
        print(f"done: {WORKDIR.value}")
    return 0


if __name__ == "__main__":
    app.run(main)
