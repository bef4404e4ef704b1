"""How a task's source and answer become what a model reads and predicts.

continue   BOS source SEP answer EOS in one sequence: a decoder predicts each next token
in place   the source alone: where each of its tokens stands an encoder predicts the token of the answer
translate  source EOS for an encoder; BOS answer EOS for the decoder that reads it
"""

from typing import Literal

Layout = Literal["continue", "in place", "translate"]
