"""Small models to split over the simulated devices: one of plain torch; Qwen2, GPT-2 and T5 of
transformers.

Each is made with the same random weights every time, in eval mode, on the CPU. Import this only in
a simulated process.
"""

from typing import Any

import torch
from torch import nn

VOCABULARY = 97
WIDTH = 32
LAYERS = 6


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.after = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.before(hidden)
        hidden = (
            hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        )
        out: torch.Tensor = hidden + self.narrow(nn.functional.gelu(self.widen(self.after(hidden))))
        return out


class Transformer(nn.Module):  # type: ignore[misc]
    """Token ids of shape (batch, length) -> logits of shape (batch, length, VOCABULARY)."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        mask = torch.full((length, length), float("-inf"), device=input_ids.device).triu(1)
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def transformer() -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    model.eval()
    return model


THREE = {
    "embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "layers.4": 2,
    "layers.5": 2, "norm": 2, "head": 2,
}  # fmt: skip
"""`transformer()` on three devices; accelerate's main device, to which outputs return, is the
first.
"""


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def gpt2() -> Any:
    """Its head is its embedding: one tensor, two names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def mixtral() -> Any:
    """Its experts are a tensor each in the file; transformers 5 merges them into one."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3,
        num_heads=4, decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="relu",
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def tokens(device: str = "cuda:0") -> torch.Tensor:
    """Two rows of seven token ids, none of them special."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCABULARY, (2, 7), generator=generator).to(device)


def arguments(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of this model's forward, on the first device."""
    given = {"input_ids": tokens()}
    if not isinstance(model, Transformer):
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        given["decoder_input_ids"] = tokens()[:, :3]
    return given


def logits_of(model: nn.Module) -> torch.Tensor:
    out = model(**arguments(model))
    logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return logits


def gradients_of(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward; return the logits and each parameter's gradient, on the CPU."""
    model.zero_grad(set_to_none=True)
    logits = logits_of(model)
    logits.square().sum().backward()
    gradients = {
        name: tensor.grad.cpu()
        for name, tensor in model.named_parameters()
        if tensor.grad is not None
    }
    return logits.detach().cpu(), gradients


def generated(model: Any, **options: Any) -> torch.Tensor:
    """Return the ids that `generate` makes, without sampling, on the CPU."""
    given = {name: value for name, value in arguments(model).items() if name != "decoder_input_ids"}
    ids: torch.Tensor = model.generate(**given, max_new_tokens=5, do_sample=False, **options)
    return ids.cpu()


def balanced_map(model: nn.Module, devices: int = 3) -> dict[str, Any]:
    """Return the device map that `device_map="auto"` makes of it."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    # transformers has a set here, of which accelerate 1.6.0 makes no sense.
    whole = list(getattr(model, "_no_split_modules", None) or ())
    room = dict.fromkeys(range(devices), 8 << 30)
    memory = get_balanced_memory(model, max_memory=room, no_split_module_classes=whole)
    return dict(infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole))
