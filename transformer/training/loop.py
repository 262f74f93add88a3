"""The training loop: resumes by itself, saves when told to stop, reports as it goes."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from transformer import distributed, sharding
from transformer.checkpoints import source as sources
from transformer.checkpoints.workdir import Workdir, WorkdirError
from transformer.config import Run
from transformer.nn.model import Transformer
from transformer.ops.experts import products
from transformer.tokenizer import Tokenizer, load_tokenizer
from transformer.training import balance as balancing
from transformer.training import boards, data, guard, metrics
from transformer.training.examples import shape_of
from transformer.training.feed import Feed
from transformer.training.norms import compile_norms
from transformer.training.objectives import make_objective
from transformer.training.pairs import Pair
from transformer.training.profile import Profiler
from transformer.training.replicas import ReplicaGuard
from transformer.training.state import TrainState, abstract_state, init_state, state_of
from transformer.training.step import compile_together, compile_train_step, make_eval_step, means
from transformer.training.watch import StopRequest, Watchdog

log = logging.getLogger("transformer")

Sampler = Callable[[Transformer, dict, Tokenizer], str]
FlopCount = Callable[[int, int | None], float]
Matcher = Callable[[Transformer, dict, Tokenizer, Sequence[Pair]], float]


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended: the state, the last evaluation, and whether all steps were done."""

    state: TrainState
    evaluation: dict[str, float] = field(default_factory=dict)
    finished: bool = True


def train(
    run: Run,
    workdir: str,
    *,
    count_flops: FlopCount | None = None,
    sampler: Sampler | None = None,
    matcher: Matcher | None = None,
    profile: tuple[int, int] | None = None,
    quiet: bool = False,
) -> Result:
    """Trains `run` in `workdir`, from its newest checkpoint if it has one.

    SIGTERM or SIGINT saves after the step in flight and returns with `finished=False`; a second SIGINT interrupts. Of
    several processes (`distributed.join`) all call this with the same `run` and `workdir`, and a signal to one is
    heeded by all.

    Args:
      count_flops: training FLOPs a token of rows of so many tokens, that bear those of an encoder's rows; for MFU.
      sampler: makes text with the current parameters, called every `train.sample_every` steps and at the end.
      profile: first and last of the steps that JAX's profiler records, into the workdir's profile/.
      matcher: what fraction of pairs the current parameters answer exactly, of `train.eval_pairs` at each evaluation.

    Raises:
      SettingsError, ShardingError, WorkdirError, DistributedError: before anything is compiled.
      WorkdirError: no room for a checkpoint.
      SkippedError: too many steps in a row had no finite loss and gradient (`train.stop_after_skipped`).
      ReplicaError: devices disagree about what they should hold copies of (`train.check_replicas_every`).
    """
    return _Loop(run, workdir, count_flops, sampler, matcher, profile, quiet).run_all()


class _Loop:
    """The parts of one run, made in the order in which they can fail: cheap checks first, compiling last."""

    def __init__(self, run: Run, workdir: str, count_flops, sampler, matcher, profile, quiet: bool):
        values = json.dumps(run.values, sort_keys=True, default=str).encode()
        distributed.check_same(hashlib.sha256(values).digest(), "the config")
        self.settings = run.settings
        self.count_flops, self.sampler, self.matcher = count_flops, sampler, matcher
        self.quiet = quiet or jax.process_index() != 0
        with distributed.together("checking the run"):
            self._check(run)
        self._open(run, workdir)
        train = self.settings.train
        self.data_ended = False
        self.guard = ReplicaGuard(self.like) if train.check_replicas_every else None
        self.watchdog = Watchdog(train.watchdog_seconds)
        self.profiler = Profiler(profile, self.workdir.path / "profile")
        self.norms = compile_norms(self.model, self.settings, self.mesh)
        self.train_step = compile_train_step(self.model, self.settings)
        eval_step = make_eval_step(self.model, train.mtp_weight)
        self.eval_step = jax.jit(eval_step, compiler_options=products.compiler_options())

    def _check(self, run: Run) -> None:
        settings = self.settings
        boards.check_project(settings.train.wandb_project)
        balancing.check_balance(run.spec, settings.balance)
        self.mesh = sharding.make_mesh(settings.mesh)
        sharding.check_batch(settings.data.batch_size // settings.train.accumulate, self.mesh, settings.compute.rules)
        self.model = Transformer(run.spec, settings.compute)
        self.source = run.values.get("init_from")
        self.tokenizer = load_tokenizer(settings.data.tokenizer, published=self.source is not None)
        data.check_vocabulary(self.tokenizer, run.spec.vocab_size)
        shape = shape_of(run.spec)
        self.lengths = make_objective(settings.data, self.tokenizer, shape).lengths
        self._check_lengths()
        self.like = abstract_state(self.model, settings, self.mesh)
        self.feed = Feed(self.mesh, settings.data.batch_size, settings.compute.rules)
        texts = settings.data, self.tokenizer, shape
        self.batches = data.train_iterator(*texts, self.feed.rows)
        self.held_out = data.validation_batches(*texts, settings.train.eval_batches, self.feed.rows)
        asked = settings.train.eval_pairs if self.matcher else 0
        unseen = data.held_out(settings.data) if asked else []
        self.asked = [unseen[i] for i in range(min(asked, len(unseen)))]

    def _open(self, run: Run, workdir: str) -> None:
        self.workdir = Workdir(workdir, self.settings.train.keep_checkpoints)
        if self.workdir.latest_step() == 0:
            raise WorkdirError(
                f"workdir={str(self.workdir.path)!r}: holds converted parameters and no run; give it as --init-from, "
                "with a new --workdir"
            )
        with distributed.together("opening the workdir"):
            self.workdir.open_config(run.values)
            self.workdir.keep_tokenizer(self.settings.data.tokenizer)

    def _check_lengths(self) -> None:
        rules, stack = self.settings.compute.rules, self.model.spec.trunk
        if "source" in self.lengths:
            sharding.check_length("data.seq_len", self.lengths["source"], self.mesh, rules=rules)
        name = "data.target_len" if "source" in self.lengths else "data.seq_len"
        sharding.check_length(name, self.lengths["columns"], self.mesh, stack.uneven, rules)

    def run_all(self) -> Result:
        """Restores or initialises, then steps to the end or to a signal."""
        state = self._initial_state()
        step, steps = int(state.step), self.settings.train.steps
        with distributed.together("opening the log"), self.workdir.writing():
            self.log = metrics.open_log(self.workdir, self.settings.train, step) if jax.process_index() == 0 else None
        self.progress = metrics.ProgressLine(step, steps, self.quiet)
        start = f"from {self.source['path']}" if self.source else "from scratch"
        self.progress.say(f"{self._headline()}; {f'resumed at step {step}' if step else start}")
        self.peak = metrics.peak_flops(self.settings.compute.dtype) if self.count_flops else None
        clean = False
        try:
            with jax.set_mesh(self.mesh), StopRequest() as self.stop, self.watchdog:
                state, step, evaluation = self._steps(state, step, steps)
                self._save(step, state)
                if step == steps:
                    evaluation = evaluation or self._evaluate(step, state.weights)
                    self._sample(step, state.weights, last=True)
                elif not self.data_ended:
                    self.progress.say(f"stopped by a signal: saved step {step}; the same command resumes")
                else:
                    remedy = "lower train.steps, or raise epochs in data.mixture"
                    log.error("the data ended at step %d of train.steps=%d, which is saved: %s", step, steps, remedy)
                self.workdir.wait()
            clean = True
        finally:
            self.profiler.close()
            self.progress.close()
            self.batches.close()
            with self.workdir.writing():
                if clean or not distributed.joined():  # else it would wait for the others, who don't come
                    self.workdir.close()
                if self.log:
                    self.log.close()
        return Result(state, evaluation, finished=step == steps)

    def _headline(self) -> str:
        count = sum(x.size for x in jax.tree.leaves(self.like.params))
        shape = {name: size for name, size in self.mesh.shape.items() if size > 1}
        where = f"{self.mesh.size} {jax.devices()[0].device_kind} device(s) {shape or ''}".strip()
        return f"{count:,} parameters on {where}"

    def _initial_state(self) -> TrainState:
        resumed = self.workdir.resume(self.like, self.tokenizer.identity, log.error)
        if resumed is None:
            return self._first_state()
        state, position = resumed
        self.batches.set_state(position)
        return state

    def _first_state(self) -> TrainState:
        if self.source is None:
            return init_state(self.model, self.settings, self.mesh)
        source, like = sources.open_source(self.source["path"]), self.like.params
        total = sum(sources.sizes(like).values())
        with sources.progress_bar(total, f"reading {source.path.name}", not self.quiet) as advance:
            params = source.read_params(like, "float32", lambda path, count: advance(count))
        return state_of(params, self.model, self.settings, self.mesh)

    def _steps(self, state: TrainState, step: int, steps: int) -> tuple[TrainState, int, dict[str, float]]:
        train = self.settings.train
        evaluation, clock, stopped = {}, metrics.Clock(), False
        skipped = int(state.health.skipped)
        while step < steps and not stopped:
            with clock.waiting():
                rows = next(self.batches, None)
            if rows is None:  # every component of a mixture has given its epochs
                self.data_ended = True
                break
            batch = self.feed.put(rows)
            if clock.started is None and jax.process_count() > 1:
                compile_together(self.train_step, state, batch)
                self.watchdog.report("compiling the training step")
            self.profiler.begin(step + 1)
            state, values = self.train_step(state, batch)
            step += 1
            if self.profiler.end(step, state.step):
                self.progress.say(f"step {step}: profile in {self.profiler.folder}; tensorboard --logdir shows it")
            if step % train.log_every == 0 or step == steps:
                values = metrics.plain(values)  # the only wait for the devices
                values |= self._speed(clock.lap(step))
                self._record(step, "train", values)
                skipped = guard.skips(skipped, values, train.stop_after_skipped, self.progress.say, step)
            self.progress.step(step)
            normed = train.norms_every and step % train.norms_every == 0
            if normed:
                norms, histograms = jax.device_get(self.norms(state.params, batch))
                self._record(step, "norms", metrics.plain(norms), histograms)
            if self.guard and step % train.check_replicas_every == 0:
                self.guard.check(state, step)
            evaluating = train.eval_every and step % train.eval_every == 0
            evaluation = self._evaluate(step, state.weights) if evaluating else {}
            if train.checkpoint_every and step % train.checkpoint_every == 0:
                self._save(step, state)
            if train.sample_every and step % train.sample_every == 0 and step < steps:
                self._sample(step, state.weights)
            if clock.started is None or evaluating or normed:
                jax.block_until_ready(state.step)
                clock.start(step)
            self.workdir.check()
            self.watchdog.report(f"step {step}")
            stopped = self.stop.reached(step)
        return state, step, evaluation

    def _speed(self, lap: tuple[int, float, float] | None) -> dict[str, float]:
        """Since the last record: tokens (padding included) a second, and what that is of the devices' peak.

        `data_wait` is the share of the time that went into waiting for the next batch.
        """
        if lap is None:
            return {}
        steps, seconds, waited = lap
        rows = steps * self.settings.data.batch_size / seconds
        values = {"tokens_per_second": rows * sum(self.lengths.values()), "data_wait": waited / seconds}
        if self.peak:
            length, source = self.lengths["columns"], self.lengths.get("source")
            values["mfu"] = rows * length * self.count_flops(length, source) / self.peak
        return values

    def _record(self, step: int, kind: str, values: dict[str, Any], histograms: dict[str, Any] | None = None) -> None:
        if self.log:
            with self.workdir.writing():
                self.log.write(step, kind, values, histograms)
        if kind == "train":
            self.progress.record(step, values)

    def _evaluate(self, step: int, params: dict) -> dict[str, float]:
        """Mean loss, perplexity and bits a byte of the held-out batches."""
        sums = None
        for batch in self.held_out:
            more = self.eval_step(params, self.feed.put(batch))
            sums = more if sums is None else jax.tree.map(jax.numpy.add, sums, more)
            self.watchdog.report(f"an evaluation batch at step {step}")
        values = {name: float(x) for name, x in means(sums).items()}
        values["perplexity"] = float(np.exp(values["loss"]))
        told = ""
        if self.asked:
            values["exact_match"] = self.matcher(self.model, params, self.tokenizer, self.asked)
            told = f", {values['exact_match']:.2%} of {len(self.asked):,} unseen pairs exact"
        self._record(step, "eval", values)
        self.progress.say(
            f"step {step}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:.2f}, "
            f"{values['bits_per_byte']:.3f} bits/byte{told}"
        )
        return values

    def _sample(self, step: int, params: dict, last: bool = False) -> None:
        if self.sampler and self.settings.train.sample_every:
            text = self.sampler(self.model, params, self.tokenizer)
            self.progress.say(f"step {step}: sample\n{text}")
            if self.log:
                with self.workdir.writing():
                    self.log.text(step, "sample", text)

    def _save(self, step: int, state: TrainState) -> None:
        if step:
            if self.guard:
                self.guard.check(state, step)
            self.workdir.save(step, state, self.batches.get_state(), self.tokenizer.identity)
