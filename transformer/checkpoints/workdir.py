"""The directory of a run: its config, its tokenizer, its checkpoints.

config.json              the resolved config, written once
tokenizer.json           a copy of the Hugging Face tokenizer file, where the run uses one, and of what lies beside it
checkpoints/STEP/        state (arrays), data (the reader's position), identity (what the tokenizer is)
metrics.jsonl, tensorboard/
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from transformer.config import differences
from transformer.tokenizer import Tokenizer, load_tokenizer

# Fields that a resumed run may change: they alter where and how often things happen, or rounding, not the run.
FREE = ("mesh.", "train.log_every", "train.eval_", "train.checkpoint_every", "train.keep_", "train.sample_",
        "compute.attention", "compute.decode_attention", "compute.expert_exchange", "compute.expert_buffer",
        "compute.remat", "compute.offload", "optimizer.moments_memory", "compute.unroll", "compute.loss_chunk",
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
        config = self.read_config()
        name = config["data"]["tokenizer"]
        return load_tokenizer(name if name == "bytes" else self.path / Path(name).name, "init_from" in config)

    @property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager: asynchronous saves, a checkpoint is complete or invisible."""
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True)
            self._manager = ocp.CheckpointManager(self.path / "checkpoints", options=options)
        return self._manager

    def save(self, step: int, state: Any, data: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Starts an asynchronous save; the arrays are copied out before this returns, so they may be donated."""
        if step in self.manager.all_steps():
            return
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave(dict(data)),
                identity=ocp.args.JsonSave(dict(identity)),
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self.manager.latest_step() if (self.path / "checkpoints").is_dir() else None

    def restore(self, step: int, like: Any, identity: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(state, data position) of a step; `like` gives the shape, dtype and sharding of every leaf.

        Raises:
          WorkdirError: the checkpoint was trained with another tokenizer, or its arrays don't fit `like`.
        """
        saved = self.manager.restore(
            step, args=ocp.args.Composite(data=ocp.args.JsonRestore(), identity=ocp.args.JsonRestore())
        )
        if saved.identity != dict(identity):
            raise WorkdirError(
                f"workdir={str(self.path)!r} step {step}: trained with tokenizer {saved.identity}, "
                f"but data.tokenizer is {dict(identity)}; use the same tokenizer"
            )
        return self._restore_state(step, like), saved.data

    def _restore_state(self, step: int, like: Any) -> Any:
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            return self.manager.restore(step, args=args).state
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise WorkdirError(f"{self.path}/checkpoints/{step}: can't be restored: {error}") from error

    def restore_params(self, like: Any) -> Any:
        """The parameters of the newest checkpoint, without the optimiser's state.

        Raises:
          WorkdirError: there is no checkpoint yet.
        """
        step = self.latest_step()
        if step is None:
            raise WorkdirError(f"workdir={str(self.path)!r}: no checkpoint yet; train until the first is saved")
        args = ocp.args.PyTreeRestore(
            item={"params": like},
            restore_args=ocp.checkpoint_utils.construct_restore_args({"params": like}),
            partial_restore=True,
        )
        directory = self.path / "checkpoints" / str(step) / "state"
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(directory, args=args)["params"]

    def wait(self) -> None:
        """Returns when every save begun is complete; raises what went wrong with one."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves and frees the manager."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None


__all__ = ["FREE", "Workdir", "WorkdirError"]
