"""Claims about attention, its scale and its heads."""

from harness.claims.rules import HALF, Claim, Compared, Diagnosed, Law, Learned, Tabled, tests

CLAIMS = (
    Claim(
        id="E01",
        where="ev 2.1",
        sentence="Without 1/√d_k, at d_k = 64, the loss oscillates within a few hundred steps.",
        settled_by=(
            Compared(of="learning suffers at unit variance", study="scale", variant="none, unit", expects="worse"),
            Compared(of="learning suffers at deviation .02", study="scale", variant="none, .02", expects="worse"),
            Tabled(
                of="most runs have spikes in their loss",
                folder="scale",
                row="none, unit",
                column="with spikes",
                at_least=HALF,
            ),
        ),
    ),
    Claim(
        id="E02",
        where="ev 2.1, de 3.2",
        sentence="For queries and keys of unit variance Var(q·k) = d_k, and dividing by √d_k makes it 1.",
        right="At d_k = 64 the standard deviation is 8: “±8” is one of them, “±20 to 30” about three.",
        settled_by=(
            Law(
                of="the variance is d_k and the factor makes it 1",
                tests=tests(
                    "components/test_scale",
                    "test_the_variance_of_a_logit_is_d_k_and_the_factor_makes_it_one",
                    "test_logits_of_64_dimensions_spread_by_8",
                ),
            ),
        ),
    ),
    Claim(
        id="E03",
        where="ev 2.1",
        sentence="Large logits saturate the softmax, whose gradient vanishes.",
        settled_by=(
            Compared(
                of="bounded logits train at a rate four times as large",
                study="qk-norm",
                variant="QK-norm, .016",
                expects="better",
            ),
            Law(
                of="the gradient vanishes as logits grow",
                tests=tests("components/test_scale", "test_the_gradient_of_softmax_vanishes_as_logits_grow"),
            ),
        ),
    ),
    Claim(
        id="E05",
        where="ev 2.2",
        sentence="One head is an expressive bottleneck.",
        settled_by=(Compared(of="one head learns later than four", study="heads", variant="1 head", expects="worse"),),
    ),
    Claim(
        id="E06",
        where="ev 3.1",
        sentence="h heads of d/h dimensions cost what one head of d costs.",
        right="True of parameters, projections and products; the score matrices are h times as many.",
        settled_by=(
            Law(
                of="as many parameters and operations",
                tests=tests("test_cost", "test_heads_cost_what_one_head_costs"),
            ),
            Law(
                of="score matrices are as many as the heads",
                tests=tests("test_cost", "test_heads_cost_what_one_head_costs"),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="E07",
        where="ev 3.2",
        sentence="Heads under 32 dimensions are weak.",
        right="The limit depends on the length of the sequence: a head of d dimensions writes score matrices of rank d "
        "(Bhojanapalli et al. 2020, arXiv:2002.07028).",
        settled_by=(
            Compared(of="heads of 16 are weaker", study="head-dim", variant="4 of 16", expects="worse"),
            Compared(of="heads of 8 are weaker", study="head-dim", variant="8 of 8", expects="worse"),
            Compared(of="heads of 4 are weaker", study="head-dim", variant="16 of 4", expects="worse"),
            Compared(of="heads of 2 are weaker", study="head-dim", variant="32 of 2", expects="worse"),
        ),
    ),
    Claim(
        id="E08",
        where="ev 3.1",
        sentence="Heads specialise by themselves: neighbour, first or last token, punctuation.",
        settled_by=(
            *(
                Tabled(
                    of=f"some head is mostly on {role} when trained to {task}",
                    folder="heads",
                    row="4 heads",
                    column=column,
                    on=f"on {task}",
                    at_least=HALF,
                )
                for column, role in (
                    ("previous", "the neighbour"),
                    ("first", "the first token"),
                    ("separator", "the separator"),
                )
                for task in ("copy", "reverse")
            ),
        ),
    ),
    Claim(
        id="E09",
        where="ev 3.3",
        sentence="Without W_o heads stay independent, and capacity drops.",
        right="Independent within a layer only: the feed-forward sublayer mixes all dimensions.",
        settled_by=(
            Compared(of="learning suffers", study="output-projection", variant="none", expects="worse"),
            Compared(
                of="learning suffers with as many parameters",
                study="output-projection",
                variant="none, wider feed-forward",
                expects="worse",
            ),
            Law(
                of="within a layer heads write to dimensions of their own",
                tests=tests(
                    "components/test_output_projection",
                    "test_heads_write_to_dimensions_of_their_own_unless_they_are_projected",
                ),
            ),
        ),
    ),
    Claim(
        id="E25",
        where="ev 7.1",
        sentence="Dividing by d_k instead of √d_k learns, only slower.",
        settled_by=(
            Compared(of="it is slower at unit variance", study="scale", variant="1/d_k, unit", expects="worse"),
            Compared(of="it is slower at deviation .02", study="scale", variant="1/d_k, .02", expects="worse"),
            Learned(of="it learns at unit variance", study="scale", variant="1/d_k, unit"),
            Learned(of="it learns at deviation .02", study="scale", variant="1/d_k, .02"),
        ),
    ),
    Claim(
        id="E26",
        where="ev 7.1",
        sentence="A mask of 0 instead of −∞ pollutes the result.",
        settled_by=(Diagnosed(of="a mask of zeros is a leak that is named", faults=("mask_of_zeros",)),),
    ),
    Claim(
        id="E41",
        where="ev 3.3",
        sentence="Mask with −1e9.",
        right="Mask with −∞, which every type has; −1e9 is no number of fp16.",
        settled_by=(
            Law(
                of="fp16 has no −1e9",
                tests=tests("components/test_attention", "test_minus_1e9_is_a_mask_in_wide_types_alone"),
                refutes=True,
            ),
            Law(
                of="in fp32 and bf16 −1e9 is as good",
                tests=tests("components/test_attention", "test_minus_1e9_is_a_mask_in_wide_types_alone"),
            ),
        ),
    ),
    Claim(
        id="E40",
        where="de 4.1",
        sentence="A mask of shape (batch, seq, seq) broadcasts against (batch, head, seq, seq).",
        right="Use (batch, 1, seq, seq): without, batch is read as head, silently wrong where they are as many.",
        settled_by=(
            Law(
                of="it is read as one mask a head",
                tests=tests("components/test_attention", "test_a_mask_without_a_dimension_for_heads_masks_other_heads"),
                refutes=True,
            ),
            Law(
                of="it is refused here",
                tests=tests(
                    "components/test_attention",
                    "test_a_mask_without_a_dimension_for_heads_is_refused",
                    "test_a_model_takes_a_mark_a_token_and_no_mask",
                ),
                refutes=True,
            ),
            Diagnosed(of="it is a fault that is named", faults=("padding_over_heads",), refutes=True),
        ),
    ),
    Claim(
        id="E27",
        where="ev 7.2",
        sentence="Uniform attention maps come from a missing scale.",
        right="A missing scale sharpens; 1/d_k, a high temperature or too little training make maps even.",
        settled_by=(
            Law(
                of="a smaller factor makes attention more even",
                tests=tests("components/test_scale", "test_a_smaller_factor_makes_attention_more_even"),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="D09",
        where="de 3.2, ev 2.3",
        sentence="The worked examples' numbers, as printed.",
        right="QKᵀ has rows [.97, 1.34, 1.04] and [1.20, .90, 1.48]; softmax [.707, 0, .707] = [.401, .198, .401], and "
        "position 1 is not ignored.",
        settled_by=(
            Law(
                of="derivation: the products are others",
                tests=tests(
                    "components/test_attention",
                    "test_the_derivations_example_has_these_products",
                    "test_the_derivations_example_with_the_right_numbers",
                    "test_the_derivations_example_to_three_decimals",
                ),
                refutes=True,
            ),
            Law(
                of="evolution: the weights are others",
                tests=tests("components/test_attention", "test_the_evolutions_example_ignores_nobody"),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="D16",
        where="de 2",
        sentence="Attention is permutation-invariant.",
        right="It is equivariant: shuffled tokens give shuffled outputs.",
        settled_by=(
            Law(
                of="it is equivariant",
                tests=(
                    *tests("components/test_attention", "test_attention_is_equivariant_under_permutation"),
                    *tests("components/test_position", "test_an_encoder_without_positions_is_permutation_equivariant"),
                ),
                refutes=True,
            ),
        ),
    ),
)
