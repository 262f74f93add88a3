"""The PyTorch sides of `train_step.py`: Hugging Face's class of the same config, eager or under `torch.compile`.

For an interpreter that has torch and transformers. Attention is `scaled_dot_product_attention`, AdamW the fused one,
and bfloat16 is autocast over float32 parameters.
"""

from collections.abc import Callable

import torch
import transformers

from benchmarks import workers

IGNORED = -100  # a target that counts for nothing


def make_model(task: dict) -> torch.nn.Module:
    """The model of a task, without dropout; a mixture's loss has its auxiliary term where that weighs anything."""
    fields = dict(task["hugging_face"])
    (name,) = fields["architectures"]
    if task["auxiliary"]:
        fields |= dict(router_aux_loss_coef=task["auxiliary"], output_router_logits=True)
    if "num_experts" in task["model"]:
        fields["experts_implementation"] = "grouped_mm"
    # No cache of keys in training, as Hugging Face's own Trainer has it.
    config = transformers.AutoConfig.for_model(**fields, attn_implementation="sdpa", use_cache=False)
    for field in vars(config):
        if field.endswith(("dropout", "dropout_prob", "_pdrop")) and getattr(config, field) is not None:
            setattr(config, field, 0.0)
    model = getattr(transformers, name)(config).train()
    assert not any(isinstance(part, torch.nn.Dropout) and part.p for part in model.modules()), "dropout is left"
    return model


def decayed_apart(model: torch.nn.Module, decay: float) -> list[dict]:
    """Two groups of parameters: matrices, which decay, and the rest."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [dict(params=matrices, weight_decay=decay), dict(params=rest, weight_decay=0.0)]


class Trainer:
    """A model, its optimiser and one batch."""

    def __init__(self, task: dict):
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        o = task["optimizer"]
        self.dtype, self.clip_norm = getattr(torch, task["dtype"]), o["clip_norm"]
        self.plain = make_model(task)
        self.model = torch.compile(self.plain) if task["compiled"] else self.plain
        groups = decayed_apart(self.plain, o["weight_decay"])
        self.optimizer = torch.optim.AdamW(groups, lr=o["peak_lr"], betas=(o["b1"], o["b2"]), eps=o["eps"], fused=True)
        batch = {name: torch.from_numpy(x.copy()) for name, x in workers.random_batch(task).items()}
        targets = batch["targets"].long().masked_fill(batch["weights"] == 0, IGNORED)
        self.batch = dict(input_ids=batch["tokens"].long(), labels=targets)
        if not task["masked"]:
            self.batch["shift_labels"] = targets  # these are the next tokens already

    def describe(self) -> dict:
        """What runs."""
        return dict(
            parameters=sum(p.numel() for p in self.plain.parameters()),
            versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
            attention=self.plain.config._attn_implementation,
            threads=torch.get_num_threads(),
        )

    def run(self, steps: int) -> float:
        """Trains some steps; the last loss."""
        for _ in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                loss = self.model(**self.batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def multiply(self) -> Callable[[], None]:
        """One product of two square matrices."""
        x = torch.ones(workers.MATMUL, workers.MATMUL, dtype=self.dtype)
        return lambda: torch.matmul(x, x)


if __name__ == "__main__":
    workers.serve(Trainer)
