"""Claims about positions, and about lengths beyond those of training."""

from harness.claims.rules import Claim, Compared, Contrasted, Law, Scored, Unmeasured, tests

POOR = 0.1  # at most so much of the unseen lengths is right: an encoding that extrapolates poorly
RICH = 0.9  # at least so much: one that extrapolates
BEYOND = (("eval/extrapolation", 1.0),)

CLAIMS = (
    Claim(
        id="E04",
        where="ev 2.2, 8",
        sentence="Without positions no task of order can be learned.",
        right="True of an encoder. A causal decoder's mask tells orders apart from two layers on (Haviv et al. 2022, "
        "arXiv:2203.16634).",
        settled_by=(
            Compared(
                of="an encoder without positions fails",
                study="position-bidirectional",
                variant="encoder, NoPE",
                expects="worse",
            ),
            Compared(
                of="a decoder without positions fails as well",
                study="position-bidirectional",
                variant="decoder, NoPE",
                expects="not better",
            ),
            Law(
                of="two causal layers tell orders apart",
                tests=tests(
                    "components/test_position",
                    "test_a_causal_decoder_without_positions_needs_two_layers_to_tell_orders_apart",
                ),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="E10",
        where="ev 4.1",
        sentence="Sinusoidal positions extrapolate poorly past the training length.",
        settled_by=(
            Scored(of="hardly any unseen length is right", study="position", variant="sinusoidal", at_most=POOR),
            Law(
                of="codes past the training length are unlike the trained ones",
                tests=tests(
                    "components/test_position",
                    "test_sinusoidal_codes_past_the_training_length_are_unlike_the_trained_ones",
                ),
            ),
        ),
    ),
    Claim(
        id="E11",
        where="ev 4.2",
        sentence="Learned positions cannot extrapolate: beyond max_len an error.",
        right="Between the training length and max_len there is no error, and untrained rows.",
        settled_by=(
            Scored(of="hardly any unseen length is right", study="position", variant="learned", at_most=POOR),
            Law(
                of="beyond max_len an error",
                tests=tests(
                    "components/test_position", "test_learned_positions_refuse_what_is_longer_than_their_table"
                ),
            ),
            Law(
                of="rows past the training length stay untrained",
                tests=tests(
                    "components/test_position",
                    "test_rows_of_learned_positions_past_the_training_length_stay_as_initialised",
                ),
            ),
        ),
    ),
    Claim(
        id="E12",
        where="ev 4.3, de 2",
        sentence="RoPE's scores depend on distance alone, it adds no parameters, and it extrapolates to any length.",
        right="The first two are true, with e^{i·pos·θ_i}, θ_i = 10000^{−2i/d}; the third is not (Press et al. 2022, "
        "arXiv:2108.12409).",
        settled_by=(
            Scored(of="it extrapolates to twice the length", study="position", variant="RoPE", at_least=RICH),
            Scored(of="it extrapolates by two tokens", study="rope-scaling", variant="RoPE", at_least=RICH),
            Law(
                of="scores depend on distance alone",
                tests=tests(
                    "components/test_position",
                    "test_rope_scores_depend_on_the_offset_alone",
                    "test_rope_is_a_rotation_in_the_complex_plane",
                    "test_stretching_adds_no_parameters_and_keeps_scores_a_matter_of_distance",
                ),
            ),
            Law(of="it adds no parameters", tests=tests("components/test_position", "test_rope_adds_no_parameters")),
        ),
    ),
    Claim(
        id="E37",
        where="ev 4.3",
        sentence="RoPE extrapolates much better than sinusoidal positions.",
        right="Copying, others find .03 for sinusoidal and .01 for RoPE (Kazemnejad et al. 2023, arXiv:2305.19466).",
        settled_by=(Compared(of="RoPE is better", study="position", variant="RoPE", expects="better"),),
    ),
    Claim(
        id="E13",
        where="ev 4.3, 7.4",
        sentence="A larger base, 10 000 → 500 000 (NTK-aware), reaches tens of times the training length.",
        right="500 000 is the NTK-aware base of a factor of 44 to 47, which is arithmetic and no measured reach.",
        settled_by=(
            Compared(
                of="a base of 500 000 in training helps by 1.25 times the length",
                study="rope-scaling",
                variant="base 500 000",
                expects="better",
            ),
            Compared(
                of="NTK-aware scaling helps by 1.25 times", study="rope-scaling", variant="NTK-aware", expects="better"
            ),
            Compared(of="linear scaling helps by 1.25 times", study="rope-scaling", variant="linear", expects="better"),
            Compared(of="YaRN helps by 1.25 times", study="rope-scaling", variant="YaRN", expects="better"),
            Law(
                of="500 000 belongs to a factor of about 45",
                tests=tests("components/test_position", "test_a_base_of_half_a_million_is_a_factor_of_forty_five"),
            ),
            Unmeasured(
                of="tens of times the length", needs="models trained on hundreds of tokens, tested on thousands"
            ),
        ),
    ),
    Claim(
        id="E14",
        where="ev 4.4",
        sentence="ALiBi extrapolates well, and is worse than RoPE where exact positions matter.",
        settled_by=(
            Compared(of="better than sinusoidal", study="position", variant="ALiBi", expects="better"),
            Contrasted(
                of="worse than RoPE past the training length",
                study="position",
                measure=BEYOND,
                plus=("ALiBi",),
                minus=("RoPE",),
                expects="worse",
                margin=0.1,
            ),
        ),
    ),
    Claim(
        id="D02",
        where="de 2",
        sentence="Sinusoidal codes are unique, neighbours alike, PE(p + k) is linear in PE(p); low indices have low "
        "frequencies.",
        right="The first three are true; low indices have the high frequencies.",
        settled_by=(
            Law(
                of="codes are unique with neighbours alike and shifts linear",
                tests=tests(
                    "components/test_position",
                    "test_sinusoidal_codes_are_unique",
                    "test_neighbouring_sinusoidal_codes_are_more_alike_than_distant_ones",
                    "test_a_shift_of_sinusoidal_codes_is_one_linear_map",
                ),
            ),
            Law(
                of="low indices have the high frequencies",
                tests=(
                    *tests(
                        "components/test_position",
                        "test_low_dimensions_of_sinusoidal_codes_have_the_high_frequencies",
                    ),
                    *tests("test_report", "test_frequency_order_is_measured_on_the_table"),
                ),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="D01",
        where="de 1.2",
        sentence="Embeddings N(0, 1) × √d balance positions.",
        right="They drown them, √(2d) to 1; N(0, 1) and N(0, 1/d) × √d stand beside them. Xavier’s are drowned.",
        settled_by=(
            Compared(
                of="unit embeddings × √d learn as soon as without",
                study="embedding-scale",
                variant="N(0, 1) × √d",
                expects="not worse",
            ),
            Law(
                of="unit embeddings × √d drown positions",
                tests=tests(
                    "components/test_embedding", "test_unit_embeddings_times_the_root_of_the_width_drown_positions"
                ),
                refutes=True,
            ),
            Law(
                of="Xavier embeddings are drowned by positions",
                tests=tests("components/test_embedding", "test_xavier_embeddings_are_drowned_by_positions"),
                refutes=True,
            ),
        ),
    ),
)
