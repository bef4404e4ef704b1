"""Every testable claim of the two articles, in the order in which pages show them: data, a file a group."""

from harness.claims.catalogue import attention, blocks, efficiency, mixtures, position, tokens
from harness.claims.rules import Claim

GROUPS: dict[str, tuple[Claim, ...]] = {
    "Attention, scale, heads": attention.CLAIMS,
    "Position": position.CLAIMS,
    "Efficiency": efficiency.CLAIMS,
    "Blocks, norms, training": blocks.CLAIMS,
    "Mixture of experts": mixtures.CLAIMS,
    "Tokenisation": tokens.CLAIMS,
}
CLAIMS: dict[str, Claim] = {claim.id: claim for claims in GROUPS.values() for claim in claims}
