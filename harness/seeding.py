"""Every random number of the project comes from a name: a hash of integers and strings seeds the generator that draws
it.
"""

import hashlib

import torch


def stable_hash(*parts: int | str) -> int:
    """63 bits from integers and strings, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """A generator on a device, seeded from a name."""
    return torch.Generator(device).manual_seed(stable_hash(*parts))


def seed_global(*parts: int | str) -> None:
    """Seed torch's global generators from a name; Lightning's `seed_everything` costs three hundred times as much."""
    seed = stable_hash(*parts)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
