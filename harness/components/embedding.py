"""Token embeddings and the output head: what embeddings are multiplied by, and whether both are one matrix."""

import math
from abc import abstractmethod

from harness.schema import Level


class EmbeddingScale(Level):
    """Base of the factors on token embeddings, before positions are added."""

    @abstractmethod
    def factor(self, d_model: int) -> float:
        """What embeddings are multiplied by."""


class UnitEmbedding(EmbeddingScale):
    """Factor = 1: embeddings as they are."""

    def factor(self, d_model: int) -> float:
        """One."""
        return 1.0


class SqrtWidth(EmbeddingScale):
    """√d_model, as in the original (Vaswani et al. 2017, arXiv:1706.03762), whose embeddings have std 1/√d_model."""

    def factor(self, d_model: int) -> float:
        """√d_model."""
        return math.sqrt(d_model)


class OutputHead(Level):
    """Base of the ways to get from `(B, T, d_model)` to logits `(B, T, V)`."""

    @abstractmethod
    def is_tied(self) -> bool:
        """Whether the embedding matrix is the output matrix."""


class Untied(OutputHead):
    """logits = W x with a matrix of their own."""

    def is_tied(self) -> bool:
        """No."""
        return False


class Tied(OutputHead):
    """logits = E x with the embedding matrix E: V · d_model parameters fewer (Press & Wolf 2016, arXiv:1608.05859).

    Embeddings of std 1, the default of `init.embedding`, make logits of std √d_model: draw them from N(0, 1/d_model).
    """

    def is_tied(self) -> bool:
        """Yes."""
        return True
