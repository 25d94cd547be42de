"""Generate text with a model of Hugging Face transformers whose attention is kernelhub's.

Nothing is downloaded: the model is a small Llama with random weights, so what it says is noise. With a real one:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kernelhub")

Run it with ``pip install -c constraints.txt -e ".[transformers]" && python examples/transformers_generate.py``.
"""

from __future__ import annotations

import torch

import kernelhub
from kernelhub.compat.transformers import register

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as missing:
    needed = 'pip install -c constraints.txt -e ".[transformers]"'
    raise SystemExit(f"this example needs {missing.name}: run {needed} in the root of kernelhub") from missing

PAD, BOS, EOS = 256, 257, 258  # after the 256 bytes, which are the tokens
PROMPTS = ("The kettle began to sing,", "It was the first cold morning of the year,")


def small_llama() -> LlamaForCausalLM:
    """Two layers of 4 query heads and 2 KV heads, 16 wide."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation="kernelhub").eval()


def encode(prompts: tuple[str, ...]) -> torch.Tensor:
    """A token per byte, padded on the left: int64 [prompts, bytes of the longest]."""
    rows = [[BOS, *prompt.encode()] for prompt in prompts]
    longest = max(map(len, rows))
    return torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])


def main() -> None:
    register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = small_llama().to(device), encode(PROMPTS).to(device)
    generated = model.generate(ids, attention_mask=ids != PAD, max_new_tokens=24, do_sample=False)
    for prompt, row in zip(PROMPTS, generated[:, ids.shape[1] :], strict=True):
        print(prompt, repr(bytes(token for token in row.tolist() if token < PAD)))
    print(kernelhub.report())


if __name__ == "__main__":
    main()
