"""The directory of a run: its config, its tokenizer, its checkpoints.

config.json              the resolved config, written once
tokenizer.json           a copy of the Hugging Face tokenizer file, where the run uses one, and of what lies beside it
checkpoints/STEP/        state (arrays), data (the reader's position), identity (what the tokenizer is), checksums
damaged/STEP/            a checkpoint that a run found damaged before it went on from an earlier one
metrics.jsonl, tensorboard/; and wandb.id, wandb/ where a run is shown there, too

Many processes share it: each writes its part of a checkpoint's arrays, process 0 all else.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from transformer import distributed
from transformer.checkpoints import integrity
from transformer.checkpoints.integrity import DamagedError
from transformer.checkpoints.manager import Manager
from transformer.config import differences
from transformer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("transformer")

# Fields that a resumed run may change: they alter where and how often things happen, or rounding, not the run.
FREE = ("data.workers", "data.cache",
        "mesh.", "train.log_every", "train.eval_", "train.checkpoint_every", "train.keep_", "train.sample_",
        "train.watchdog_", "train.norms_", "train.wandb_", "train.check_replicas_", "optimizer.moments_memory",
        "compute.attention", "compute.context_attention", "compute.decode_attention", "compute.expert_exchange",
        "compute.expert_buffer", "compute.remat", "compute.offload", "compute.unroll", "compute.loss_chunk",
        "compute.rules")  # fmt: skip


# Files beside a tokenizer.json that say how its texts begin, end and take turns.
BESIDE = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")


class WorkdirError(ValueError):
    """A workdir can't be used; the message names it and says what to do."""


class Workdir:
    """One run's directory. Nothing is created before `open_config`."""

    def __init__(self, path: str | os.PathLike, keep: int = 2):
        self.path = Path(path).absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None

    @property
    def _config_file(self) -> Path:
        return self.path / "config.json"

    def read_config(self) -> dict[str, Any]:
        """The config that the run was started with.

        Raises:
          WorkdirError: no run here, or its config is damaged.
        """
        if not self._config_file.is_file():
            raise WorkdirError(f"workdir={str(self.path)!r}: no run here (config.json is missing); train one first")
        try:
            values = json.loads(self._config_file.read_text())
        except ValueError as error:
            raise WorkdirError(f"{self._config_file}: damaged ({error}); restore it or use a new workdir") from None
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            raise WorkdirError(f"{self._config_file}: not the config of a run (no model); use a new workdir")
        return values

    def open_config(self, values: Mapping[str, Any]) -> None:
        """Starts a run here, or checks that the run that lives here is this one.

        Raises:
          WorkdirError: the directory can't be written, or holds a run of another config: its fields are named.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._config_file.is_file():
                changed = differences(self.read_config(), json.loads(json.dumps(values)))
                refused = [line for line in changed if not line.startswith(FREE)]
                if refused:
                    raise WorkdirError(
                        f"workdir={str(self.path)!r} holds a run of another config: {'; '.join(refused)}. "
                        "Use the old values, or another workdir"
                    )
            self._write(self._config_file, json.dumps(values, indent=2) + "\n")
        except OSError as error:
            why = f"can't be written ({error.strerror}); use another workdir"
            raise WorkdirError(f"workdir={str(self.path)!r}: {why}") from None

    def _write(self, file: Path, text: str) -> None:
        """All or nothing, and one process writes."""
        if jax.process_index() == 0:
            partial = file.with_suffix(".partial")
            partial.write_text(text)
            os.replace(partial, file)

    def keep_tokenizer(self, name_or_path: str) -> None:
        """Copies a tokenizer file beside the run, so that the workdir is complete in itself."""
        source = Path(name_or_path)
        if name_or_path != "bytes" and jax.process_index() == 0:
            for file in (source, *map(source.with_name, BESIDE)):
                if file.is_file() and not (self.path / file.name).exists():
                    shutil.copyfile(file, self.path / f"{file.name}.partial")
                    os.replace(self.path / f"{file.name}.partial", self.path / file.name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with."""
        return load_tokenizer(self.tokenizer_name(), "init_from" in self.read_config())

    def tokenizer_name(self) -> str:
        """What names it: "bytes", or the path of the copy.

        Raises:
          WorkdirError: no run here, or its config names none.
        """
        data = self.read_config().get("data")
        name = data.get("tokenizer") if isinstance(data, dict) else None
        if not isinstance(name, str):
            why = "names no tokenizer (data.tokenizer); restore it or use another workdir"
            raise WorkdirError(f"{self._config_file}: {why}")
        return name if name == "bytes" else str(self.path / Path(name).name)

    @property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager: asynchronous saves, a checkpoint is complete or invisible."""
        if self._manager is None:
            self._manager = Manager(self.path / "checkpoints", self._keep)
        return self._manager

    def save(self, step: int, state: Any, data: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Starts an asynchronous save; the arrays are copied out before this returns, so they may be donated.

        Raises:
          WorkdirError: there is no room for it, or there was none for the one before.
        """
        if step in self.manager.all_steps():
            return
        texts = {"data": dict(data), "identity": dict(identity)}
        with self.writing():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    checksums=ocp.args.JsonSave(integrity.seal(state, texts)),
                    **{name: ocp.args.JsonSave(text) for name, text in texts.items()},
                ),
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises `WorkdirError` where what is written finds no room on the disk."""
        try:
            yield
        except Exception as error:
            why = integrity.no_room(error)
            if why is None:
                raise
            step = max(self._whole_steps(), default=None)
            rest = "no checkpoint is whole yet" if step is None else f"the checkpoint of step {step} is whole"
            raise WorkdirError(
                f"workdir={str(self.path)!r}: can't be written ({why}); {rest}. Make room, and the same command resumes"
            ) from error

    def _whole_steps(self) -> list[int]:
        folder = self.path / "checkpoints"
        return [int(x.name) for x in folder.iterdir() if x.name.isdecimal()] if folder.is_dir() else []

    def latest_step(self, before: int | None = None) -> int | None:
        """Step of the newest complete checkpoint (older than `before`), as process 0 sees it."""
        steps = [step for step in self._whole_steps() if before is None or step < before]
        step = distributed.from_first(max(steps, default=-1))
        return None if step < 0 else step

    def resume(self, like: Any, identity: Mapping[str, Any], say: Callable[[str], None]) -> tuple[Any, dict] | None:
        """(state, data position) of the newest checkpoint that is sound, None if there is none at all.

        Damaged ones that are newer are told by `say` and moved to damaged/.

        Raises:
          WorkdirError: as `restore`; or every checkpoint is damaged.
        """
        return self._newest(lambda step: self.restore(step, like, identity), say, move=True)

    def _newest[T](self, read: Callable[[int], T], say: Callable[[str], None], move: bool = False) -> T | None:
        """What `read` makes of the newest checkpoint that it doesn't find damaged."""
        step, damaged = self.latest_step(), {}
        while step is not None:
            try:
                found = read(step)
            except (DamagedError, distributed.DistributedError) as error:
                damaged[step], step = distributed.first_line(error), self.latest_step(before=step)
                continue
            for other, why in damaged.items():
                if move:
                    self._set_aside(other)
                moved = f"; moved to {self.path / 'damaged' / str(other)}" if move else ""
                say(f"the checkpoint of step {other} is damaged ({why}){moved}: using that of step {step}")
            return found
        if damaged:
            told = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
            raise WorkdirError(f"workdir={str(self.path)!r}: no checkpoint can be read ({told}); use another workdir")
        return None

    def _set_aside(self, step: int) -> None:
        with distributed.together("setting a damaged checkpoint aside"):
            if jax.process_index() == 0:
                target = self.path / "damaged" / str(step)
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                os.replace(self.path / "checkpoints" / str(step), target)

    def restore(self, step: int, like: Any, identity: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(state, data position) of a step; `like` gives the shape, dtype and sharding of every leaf.

        Raises:
          WorkdirError: the checkpoint was trained with another tokenizer.
          DamagedError: it can't be read, or isn't what was saved.
        """
        state, texts = self._read(step, like, identity)
        return state, texts["data"]

    def restore_params(self, like: Any, say: Callable[[str], None] = log.error) -> Any:
        """The parameters of the newest checkpoint that is sound, without the optimiser's state.

        Those that the run evaluates with: the average over its steps where it keeps one.

        Raises:
          WorkdirError: there is no checkpoint yet, or every one is damaged.
        """
        name = "params"
        if self._config_file.is_file() and self.read_config().get("optimizer", {}).get("average_decay"):
            name = "average"
        found = self._newest(lambda step: self._read(step, {name: like})[0][name], say)
        if found is None:
            raise WorkdirError(f"workdir={str(self.path)!r}: no checkpoint yet; train until the first is saved")
        return found

    def _read(self, step: int, like: Any, identity: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Arrays and texts of a step, verified; without `identity` what `like` has of the arrays, of any tokenizer."""
        folder = self.path / "checkpoints" / str(step)
        with distributed.together(f"reading {folder}"):
            seal, texts = integrity.read_texts(folder, ("data", "identity"))
            if identity is not None and texts["identity"] != dict(identity):
                raise WorkdirError(
                    f"workdir={str(self.path)!r} step {step}: trained with tokenizer {texts['identity']}, "
                    f"but data.tokenizer is {dict(identity)}; use the same tokenizer"
                )
            found = integrity.read_arrays(folder, like, partial=identity is None)
        if seal is None:
            log.warning("%s: saved without checksums, not verified", folder)
        else:
            sums = integrity.sums(found)  # not in a block that a process may leave alone: all compute them
            with distributed.together(f"verifying {folder}"):
                integrity.verify(sums, seal)
        return found, texts

    def check(self) -> None:
        """Whether the save that was begun has failed in this process; waits for nobody.

        Raises:
          WorkdirError: there was no room for it.
        """
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()  # no longer than its thread takes to end

    def wait(self) -> None:
        """Returns when every save begun is complete.

        Raises:
          WorkdirError: there was no room for it.
        """
        if self._manager is not None:
            with self.writing():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves and frees the manager."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()


__all__ = ["FREE", "DamagedError", "Workdir", "WorkdirError"]
