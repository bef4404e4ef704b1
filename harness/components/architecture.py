"""Architecture: one stack that reads and writes, or an encoder beside a decoder."""

from abc import abstractmethod
from typing import ClassVar

from harness.layout import Layout
from harness.schema import Level


class Architecture(Level):
    """Base of the architecture axis.

    `layout` says how a task's source and answer become tokens, see `harness.layout`.
    """

    layout: ClassVar[Layout]

    @abstractmethod
    def is_causal(self) -> bool:
        """Whether the stack that gives the logits sees only tokens that do not lie ahead."""

    def has_encoder(self) -> bool:
        """Whether another stack reads the source."""
        return False


class DecoderOnly(Architecture):
    """One causal stack, p(x_t | x_{<t}): source and answer are one sequence (Radford et al. 2018; Brown et al. 2020,
    arXiv:2005.14165).
    """

    layout = "continue"

    def is_causal(self) -> bool:
        """Yes."""
        return True


class EncoderOnly(Architecture):
    """One stack without a mask, p(y_t | x) for all t at once: the answer is read off where the source stands (Devlin
    et al. 2018, arXiv:1810.04805), so it must be as long as the source; there is no end token (a task's
    train_end_token is without effect).
    """

    layout = "in place"

    def is_causal(self) -> bool:
        """No."""
        return False


class EncoderDecoder(Architecture):
    """A stack without a mask reads the source, a causal one writes the answer and attends to it, p(y_t | y_{<t}, x)
    (Vaswani et al. 2017, arXiv:1706.03762). Both have num_layers layers and share the embedding.
    """

    layout = "translate"

    def is_causal(self) -> bool:
        """The decoder is."""
        return True

    def has_encoder(self) -> bool:
        """Yes."""
        return True
