"""Load, run, train and save the published models of this family. It needs flax, which `import glax` does not.

>>> model = glax.models.from_pretrained("folder")
>>> logits = model(tokens)
"""

from glax.models.adapters import load_adapter, lora, merge_lora, save_adapter, without_lora
from glax.models.config import ModelConfig, UnsupportedOption
from glax.models.generation import end_tokens, generate, stream
from glax.models.load import MODEL_TYPES, from_config, from_pretrained
from glax.models.model import CausalLM
from glax.models.saving import save_pretrained
from glax.models.shardings import partition_spec, shard

__all__ = [
    "MODEL_TYPES", "CausalLM", "ModelConfig", "UnsupportedOption", "end_tokens", "from_config", "from_pretrained",
    "generate", "load_adapter", "lora", "merge_lora", "partition_spec", "save_adapter", "save_pretrained", "shard", "stream",
    "without_lora",
]  # fmt: skip
