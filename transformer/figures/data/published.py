"""Published models by the name of their config: "llama3:8b"."""

from transformer import config, families, spec

# One of each kind, in the order in which they came.
LESSON = (
    "vaswani:base", "gpt2:xl", "gpt3:175b", "mistral:7b-v0.1", "mixtral:8x7b", "llama3:8b", "deepseek_v3:671b",
    "gemma3:27b", "qwen3_moe:235b-a22b", "gpt_oss:120b",
)  # fmt: skip


def model(reference: str | spec.Model) -> spec.Model:
    """The spec that a config's name stands for; a spec is itself.

    Raises:
      SettingsError: no such page or size.
    """
    if isinstance(reference, spec.Model):
        return reference
    return families.build_spec(config.load_config(reference).model.to_dict())
