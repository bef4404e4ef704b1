"""Small Hugging Face decoders under the probes: healthy ones raise no alarm, planted faults are named.

Nothing is downloaded: a config says what the model is, and its weights are drawn. A model that was loaded is described
by the same functions, with `trained=True`. It runs where transformers is, in the environment of `make faults`:

    .venv-bench/bin/python docs/examples/huggingface.py
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from harness.diagnostics import AttentionSite, Finding, Positions, Subject, examine
from tasks.task import Batch

KERNELS = ("sdpa", "eager")
WORDS, LENGTH, SEQUENCES = 96, 24, 4


def llama_model(kernel: str) -> LlamaForCausalLM:
    """Two blocks, four heads of queries, two of keys and values."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation=kernel,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def gpt2_model(kernel: str) -> GPT2LMHeadModel:
    """Two blocks, four heads, dropout .1, the output head tied to the embedding."""
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=kernel,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Logits, as training computes them."""
    return model(input_ids=batch.inputs, attention_mask=batch.real).logits


def read(model: nn.Module, batch: Batch, pieces: Sequence[int]) -> Tensor:
    """Logits of a batch read in pieces with the key-value cache, `past_key_values` before transformers 5.24."""
    cache, found = DynamicCache(config=model.config), []
    for tokens in batch.inputs.split(list(pieces), dim=1):
        found.append(model(input_ids=tokens, cache=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)


def held(model: nn.Module, batch: Batch, groups: int, width: int) -> tuple[int, int]:
    """Bytes of keys and values after a batch, and those of `groups` heads in each layer."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=batch.inputs, cache=cache, use_cache=True)
    declared = 2 * groups * width * batch.inputs.numel() * model.config.num_hidden_layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), 4 * declared


def next_tokens() -> Batch:
    """Sequences of arbitrary tokens, and what is asked for: the next ones."""
    tokens = torch.randint(WORDS, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def names(model: PreTrainedModel) -> tuple[str, ...]:
    """Of the parameters that the config makes; what is tied counts once."""
    with torch.random.fork_rng():
        return tuple(name for name, _ in type(model)(model.config).named_parameters())


def llama(model: LlamaForCausalLM) -> Subject:
    """A Llama, as its config declares it."""
    config, batch = model.config, next_tokens()
    width, layers = config.head_dim, [f"model.layers.{n}" for n in range(config.num_hidden_layers)]
    base = config.rope_parameters["rope_theta"]
    return Subject(
        model=model,
        tokens=batch,
        batch=batch,
        predict=predict,
        vocabulary=(0, config.vocab_size),
        sites=tuple(
            AttentionSite(
                path=f"{layer}.self_attn",
                query=f"{layer}.self_attn.q_proj",
                key=f"{layer}.self_attn.k_proj",
                value=f"{layer}.self_attn.v_proj",
                output=f"{layer}.self_attn.o_proj",
                num_heads=config.num_attention_heads,
                num_groups=config.num_key_value_heads,
                scale=width**-0.5,
            )
            for layer in layers
        ),
        positions=Positions(
            act=True,
            relative=True,
            frequencies=base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width),
            embedding="model.embed_tokens",
            first_block="model.layers.0",
        ),
        takes_padding=True,
        read=read,
        held=partial(held, model, batch, config.num_key_value_heads, width),
        optimizer=lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        parameters=names(model),
        deviations={name: config.initializer_range for name, p in model.named_parameters() if p.dim() == 2},
        draws=config.attention_dropout > 0,
        blocks=tuple(layers),
        residual="sum",
        sublayers=tuple(f"{layer}.{name}" for layer in layers for name in ("self_attn", "mlp")),
        units=tuple(f"{layer}.mlp.down_proj" for layer in layers),
    )


def gpt2(model: GPT2LMHeadModel) -> Subject:
    """A GPT-2, as its config declares it."""
    config, batch = model.config, next_tokens()
    width, layers = config.n_embd // config.n_head, [f"transformer.h.{n}" for n in range(config.n_layer)]
    # Declared before anything is planted, as the config has no numbers for them: what the table holds for each place.
    codes = model.transformer.wpe.weight.detach()[:LENGTH].clone()
    residual = config.initializer_range / math.sqrt(2 * config.n_layer)
    return Subject(
        model=model,
        tokens=batch,
        batch=batch,
        predict=predict,
        vocabulary=(0, config.vocab_size),
        sites=tuple(
            AttentionSite(
                path=f"{layer}.attn",
                query=f"{layer}.attn.c_attn",  # queries, keys and values side by side
                key=f"{layer}.attn.c_attn",
                value=f"{layer}.attn.c_attn",
                output=f"{layer}.attn.c_proj",
                num_heads=config.n_head,
                num_groups=config.n_head,
                scale=width**-0.5,
            )
            for layer in layers
        ),
        positions=Positions(act=True, codes=codes, embedding="transformer.wte", first_block="transformer.h.0"),
        takes_padding=True,
        read=read,
        held=partial(held, model, batch, config.n_head, width),
        optimizer=lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        parameters=names(model),
        deviations={
            name: residual if name.endswith("c_proj.weight") else config.initializer_range
            for name, p in model.named_parameters()
            if p.dim() == 2
        },
        draws=max(config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) > 0,
        blocks=tuple(layers),
        residual="sum",
        sublayers=tuple(f"{layer}.{name}" for layer in layers for name in ("attn", "mlp")),
        units=tuple(f"{layer}.mlp.c_proj" for layer in layers),
    )


def attentions(subject: Subject) -> Iterator[Any]:
    """The attention sublayers."""
    return (subject.model.get_submodule(site.path) for site in subject.sites)


def unscaled(subject: Subject) -> Subject:
    """The division by √d_head is lost."""
    for attention in attentions(subject):
        attention.scaling *= math.sqrt(attention.head_dim)
    return subject


def unmasked(subject: Subject) -> Subject:
    """Every query sees every key."""
    subject.model.config.is_causal = False  # asked where a mask is made
    for attention in attentions(subject):
        attention.is_causal = False  # asked where none is made, and the kernel hides what lies ahead
    return subject


def restarted(subject: Subject) -> Subject:
    """Positions begin anew with each piece that is read behind a cache."""

    def restarts(model: nn.Module, batch: Batch, pieces: Sequence[int]) -> Tensor:
        cache, found = DynamicCache(config=model.config), []
        for tokens in batch.inputs.split(list(pieces), dim=1):
            places = torch.arange(tokens.shape[1])[None]
            found.append(model(input_ids=tokens, position_ids=places, cache=cache, use_cache=True).logits)
        return torch.cat(found, dim=1)

    return replace(subject, read=restarts)


def frozen(subject: Subject) -> Subject:
    """The last block's parameters ask for no gradient."""
    subject.model.get_submodule(subject.blocks[-1]).requires_grad_(False)
    return subject


def bypassed(subject: Subject) -> Subject:
    """The first block hands on half of its input instead of all of it."""

    def halve(_module: nn.Module, args: Any, _kwargs: Any, output: Any) -> Any:
        return output - args[0] / 2 if isinstance(output, Tensor) else (output[0] - args[0] / 2, *output[1:])

    subject.model.get_submodule(subject.blocks[0]).register_forward_hook(halve, with_kwargs=True)
    return subject


def halved(subject: Subject) -> Subject:
    """Half of the gradient goes back through the first block."""

    def halve(_module: nn.Module, before: Any, _after: Any) -> Any:
        return tuple(g / 2 if g is not None and g.is_floating_point() else g for g in before)

    subject.model.get_submodule(subject.blocks[0]).register_full_backward_hook(halve)
    return subject


def another_base(subject: Subject) -> Subject:
    """RoPE turns by base 500000, as where a config's `rope_theta` is not the one that weights were trained with."""
    rotary = subject.model.model.rotary_emb
    rotary.inv_freq = 500_000.0 ** -(torch.arange(0, 2 * len(rotary.inv_freq), 2) / (2 * len(rotary.inv_freq)))
    return subject


def one_further(subject: Subject) -> Subject:
    """Learned codes are read one place too far on."""
    subject.model.transformer.wpe.register_forward_pre_hook(lambda module, places: (places[0] + 1,))
    return subject


def untied(subject: Subject) -> Subject:
    """The output head holds a copy of the embedding instead of the embedding."""
    head = subject.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    return subject


@dataclass(frozen=True)
class Case:
    """A decoder, how it is described, and the faults that are planted in it, each with the probe that names it."""

    make: Callable[[str], PreTrainedModel]
    describe: Callable[[Any], Subject]
    faults: dict[Callable[[Subject], Subject], str]


SHARED = {
    unscaled: "scale_fit",
    unmasked: "causal_leak",
    restarted: "cache_parity",
    frozen: "wiring",
    bypassed: "residual_fit",
    halved: "backward_fit",
}
CASES = {
    "Llama": Case(llama_model, llama, SHARED | {another_base: "rotation_fit"}),
    "GPT-2": Case(gpt2_model, gpt2, SHARED | {one_further: "code_fit", untied: "wiring"}),
}


def alarms(subject: Subject) -> list[Finding]:
    """What alarms, in the order of triage."""
    return [finding for finding in examine(subject) if finding.alarms]


def main() -> int:
    """How many of the cases came out otherwise than they should."""
    wrong = 0
    for kernel in KERNELS:
        for name, case in CASES.items():
            found = alarms(case.describe(case.make(kernel)))
            wrong += bool(found)
            print(f"{name}, {kernel}: {'healthy' if not found else 'a false alarm'}")
            print("\n".join(f"  {line}" for finding in found for line in finding.lines()), end="\n" * bool(found))
            for plant, expected in case.faults.items():
                found = alarms(plant(case.describe(case.make(kernel))))
                named = found[0].probe.name if found else "nothing"
                wrong += named != expected
                due = "" if named == expected else f" (should be {expected})"
                print(f"  {plant.__name__}: {named}{due}" + (f": {found[0].cause}" if found else ""))
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
