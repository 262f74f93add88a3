"""The PyTorch side of `train_step.py`: GPT-2 or Mixtral of Hugging Face, trained on request.

A process of its own, for an interpreter that has torch and transformers. One JSON object a line: the first line read
is the shape of the run; the answer says what runs. Then every {"steps": n} is answered by the seconds that n steps
took and the last loss. The end of the input ends the process.
"""

import json
import sys
import time

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM


def gpt2(shape: dict) -> GPT2LMHeadModel:
    """GPT-2 without dropout."""
    config = GPT2Config(
        vocab_size=shape["vocab_size"],
        n_positions=shape["max_length"],
        n_embd=shape["d_model"],
        n_layer=shape["num_layers"],
        n_head=shape["num_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation=shape["attention"],
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def mixtral(shape: dict) -> MixtralForCausalLM:
    """Mixtral; its loss has the auxiliary term where that weighs anything."""
    config = MixtralConfig(
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_length"],
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        num_local_experts=shape["num_experts"],
        num_experts_per_tok=shape["top_k"],
        sliding_window=None,
        router_aux_loss_coef=shape["auxiliary"],
        output_router_logits=shape["auxiliary"] > 0,
        attn_implementation=shape["attention"],
        experts_implementation=shape["experts"],
        use_cache=False,
    )
    return MixtralForCausalLM(config)


MODELS = {"gpt2": gpt2, "mixtral": mixtral}


class Trainer:
    """A model, its optimiser and one batch of random tokens."""

    def __init__(self, shape: dict):
        torch.manual_seed(0)
        self.autocast, self.clip_norm = shape["dtype"] == "bfloat16", shape["clip_norm"]
        self.model = MODELS[shape["family"]](shape).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=shape["learning_rate"],
            betas=tuple(shape["betas"]),
            eps=shape["eps"],
            weight_decay=shape["weight_decay"],
            fused=True,
        )
        self.tokens = torch.randint(shape["vocab_size"], (shape["batch_size"], shape["seq_len"]))

    def describe(self) -> dict:
        """What runs, in words and numbers."""
        return {
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "attention": self.model.config._attn_implementation,
            "experts": getattr(self.model.config, "_experts_implementation", None),
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def run(self, steps: int) -> dict:
        """Trains `steps` steps; wall seconds and the last loss in nats a token."""
        start = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return {"seconds": time.perf_counter() - start, "loss": loss.item()}


def main() -> None:
    """Answers requests until the input ends."""

    def answer(reply: dict) -> None:
        print(json.dumps(reply), flush=True)

    transformers.logging.set_verbosity_error()
    trainer = Trainer(json.loads(sys.stdin.readline()))
    answer(trainer.describe())
    for line in sys.stdin:
        answer(trainer.run(json.loads(line)["steps"]))


if __name__ == "__main__":
    main()
