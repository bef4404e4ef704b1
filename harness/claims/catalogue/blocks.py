"""Claims about blocks, norms, initialisation and training."""

from harness.claims.rules import HALF, Claim, Compared, Contrasted, Law, Learned, Scored, Tabled, Unmeasured, tests

FRESH = (("eval/in_distribution", 1.0),)
GAP = (("seen/exact_match", 1.0), ("eval/in_distribution", -1.0))  # the generalisation gap
OVERCONFIDENCE = (("eval/confidence", 1.0), ("eval/accuracy", -1.0))
CALIBRATION = (("eval/calibration_error", 1.0),)
EVEN = 1.05  # at least: spread of attention over that without dropout, which is less focus


def _suffers(study: str, parts: dict[str, str]) -> tuple[Compared, ...]:
    """Each variant learns later, or scores lower, than what it is compared with."""
    return tuple(Compared(of=of, study=study, variant=variant, expects="worse") for variant, of in parts.items())


def _pays(study: str, parts: dict[str, str]) -> tuple[Compared, ...]:
    """Each variant learns sooner, or scores higher, than what it is compared with."""
    return tuple(Compared(of=of, study=study, variant=variant, expects="better") for variant, of in parts.items())


def _dropout_matters_less(kind: str) -> Contrasted:
    """What dropout does on few samples minus what it does on many."""
    return Contrasted(
        of=f"{kind} dropout of .3 helps more on few samples than on many",
        study="dropout",
        measure=FRESH,
        plus=(f"few, {kind} .3", "many, none"),
        minus=("few, none", f"many, {kind} .3"),
        expects="better",
        margin=0.05,
    )


CLAIMS = (
    Claim(
        id="E22",
        where="ev 6.3, de 6.2",
        sentence="Post-LN is unstable when deep and needs warm-up; Pre-LN needs less (evolution), none (derivation).",
        settled_by=(
            Compared(
                of="deep Post-LN learns later than deep Pre-LN",
                study="norm-depth",
                variant="deep Post, .003",
                expects="worse",
            ),
            Compared(
                of="warm-up mends deep Post-LN",
                study="norm-depth",
                variant="deep Post, warm-up, .003",
                expects="better",
            ),
            Compared(
                of="deep Pre-LN gains nothing from warm-up at .01",
                study="norm-depth",
                variant="deep Pre, warm-up, .01",
                expects="not better",
            ),
        ),
    ),
    Claim(
        id="E23",
        where="ev 6.3",
        sentence="RMSNorm equals LayerNorm in quality, and is faster.",
        settled_by=(
            Compared(of="as good as LayerNorm", study="norm", variant="RMSNorm", expects="equivalent"),
            Unmeasured(of="faster", needs="both norms timed alone, on a device at a time"),
        ),
    ),
    Claim(
        id="D10",
        where="de 6.2",
        sentence="The printed LayerNorm is its formula.",
        right="It has the unbiased standard deviation, and ε outside of the root.",
        settled_by=(
            Law(
                of="it is another function",
                tests=tests("components/test_norm", "test_layer_norm_is_not_the_one_that_the_derivation_prints"),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="D13",
        where="de 6.2",
        sentence="LayerNorm rather than BatchNorm: small batches, padding, inference that knows no batch.",
        settled_by=(
            Compared(of="BatchNorm is worse", study="norm", variant="BatchNorm", expects="worse"),
            Law(
                of="BatchNorm mixes tokens in training while LayerNorm looks at one",
                tests=tests(
                    "components/test_norm",
                    "test_batch_norm_mixes_tokens_in_training_only",
                    "test_norms_look_at_one_token_only",
                ),
            ),
        ),
    ),
    Claim(
        id="D12",
        where="de 6.1",
        sentence="Residual connections are what lets deep networks train.",
        settled_by=(
            *_suffers(
                "residual",
                {
                    "6 layers, none": "six layers suffer without",
                    "3 layers, none": "three layers suffer without",
                    "2 layers, none": "two layers suffer without",
                },
            ),
            Law(
                of="without them attention makes all tokens alike",
                tests=tests("components/test_residual", "test_without_residuals_attention_makes_all_tokens_alike"),
            ),
        ),
    ),
    Claim(
        id="E24",
        where="ev 7.1",
        sentence="A large learning rate without warm-up blows up within hundreds of steps; 1–5 % of warm-up mends it.",
        settled_by=(
            *_suffers("warmup", {"none, .008": "two layers of Pre-LN learn later without at .008"}),
            Tabled(
                of="most runs of two layers of Pre-LN have spikes without at .008",
                folder="warmup",
                row="none, .008",
                column="with spikes",
                at_least=HALF,
            ),
            Learned(
                of="few runs of eight layers of Post-LN learn without",
                study="norm-depth",
                variant="deep Post, .003",
                at_least=None,
                at_most=HALF,
            ),
            Learned(
                of="most runs of eight layers of Post-LN learn with 10 %",
                study="norm-depth",
                variant="deep Post, warm-up, .003",
            ),
        ),
    ),
    Claim(
        id="E34",
        where="ev 7.1",
        sentence="The variance at which queries, keys and values are initialised matters; Xavier or Kaiming serve.",
        settled_by=(
            *_suffers("init", {"N(0, 1)": "too large a variance hurts"}),
            Compared(of="Kaiming serves as well as Xavier", study="init", variant="Kaiming", expects="not worse"),
            Law(
                of="it decides how far logits spread",
                tests=tests("components/test_init", "test_the_draw_of_queries_and_keys_decides_how_far_logits_spread"),
            ),
        ),
    ),
    Claim(
        id="E29",
        where="ev 7.5",
        sentence="Residual output projections initialised by 1/√(2L) stabilise deep networks.",
        settled_by=(
            *_pays(
                "residual-init",
                {
                    "8 layers, gain, .003": "eight layers learn sooner at .003",
                    "8 layers, gain, .01": "eight layers learn sooner at .01",
                    "8 layers, gain, .001": "eight layers learn sooner at .001",
                },
            ),
            Law(
                of="the residual stream does not grow with depth",
                tests=tests(
                    "components/test_init",
                    "test_depth_gain_keeps_the_residual_stream_from_growing_with_depth",
                    "test_depth_gain_is_one_over_the_root_of_the_number_of_sublayers",
                ),
            ),
        ),
    ),
    Claim(
        id="E28",
        where="ev 7.5",
        sentence="Tying embedding and output saves parameters, and helps in translation.",
        settled_by=(
            *_pays("tying", {"tied": "it helps in translation"}),
            Law(of="it saves a matrix", tests=tests("components/test_embedding", "test_tying_saves_a_matrix")),
        ),
    ),
    Claim(
        id="E30",
        where="ev 7.5",
        sentence="Attention dropout prevents over-focus on some positions, residual dropout overfitting.",
        settled_by=(
            Tabled(
                of="attention dropout of .3 spreads attention by 5 % or more",
                folder="dropout",
                row="few, attention .3",
                over="few, none",
                column="spread",
                at_least=EVEN,
            ),
            Contrasted(
                of="residual dropout of .3 narrows the generalisation gap",
                study="dropout",
                measure=GAP,
                plus=("few, residual .3",),
                minus=("few, none",),
                expects="worse",
                margin=0.02,
            ),
            *_pays("dropout", {"few, residual .3": "residual dropout of .3 helps on few samples"}),
        ),
    ),
    Claim(
        id="E43",
        where="ev 7.5",
        sentence="Dropout matters less the more data there is.",
        settled_by=(_dropout_matters_less("attention"), _dropout_matters_less("residual")),
    ),
    Claim(
        id="D04",
        where="de 9.1",
        sentence="Label smoothing of .1 curbs over-confidence, and helps generalisation.",
        settled_by=(
            *_pays("label-smoothing", {".1": "it helps generalisation"}),
            Contrasted(
                of="confidence falls against accuracy",
                study="label-smoothing",
                measure=OVERCONFIDENCE,
                plus=(".1",),
                minus=("none",),
                expects="worse",
                margin=0.01,
            ),
            Contrasted(
                of="the calibration error falls",
                study="label-smoothing",
                measure=CALIBRATION,
                plus=(".1",),
                minus=("none",),
                expects="worse",
                margin=0.01,
            ),
        ),
    ),
    Claim(
        id="D05",
        where="de 9.2",
        sentence="The learning rate is d^−½ · min(step^−½, step · warmup^−1.5), warm-up 4 000.",
        settled_by=(
            Law(
                of="the schedule is the formula",
                tests=tests(
                    "test_spec", "test_noam_is_the_papers_formula", "test_noam_peaks_at_the_end_of_its_warm_up"
                ),
            ),
        ),
    ),
    Claim(
        id="E35",
        where="ev 6.2",
        sentence="The feed-forward holds two thirds of a block's parameters.",
        right="8d² of 12d² with d_ff = 4d; three quarters with a SwiGLU that is as wide.",
        settled_by=(
            Law(
                of="8d² of 12d²",
                tests=(
                    *tests(
                        "components/test_feedforward",
                        "test_the_feedforward_sublayer_holds_two_thirds_of_a_blocks_weights",
                    ),
                    *tests("test_presets", "test_the_feed_forward_holds_two_thirds_of_a_block"),
                ),
            ),
        ),
    ),
    Claim(
        id="D03",
        where="de 5.2, 11",
        sentence="SwiGLU is the modern standard, so better.",
        settled_by=_pays("ffn", {"SwiGLU": "better than ReLU with as many parameters"}),
    ),
    Claim(
        id="E44",
        where="ev 8",
        sentence="Remove each module in turn and see: each would be missed.",
        settled_by=_suffers(
            "leave-one-out",
            {
                "no residual": "residual connections are missed",
                "sinusoidal": "RoPE is missed",
                "Post-LN": "Pre-LN is missed",
                "LayerNorm": "RMSNorm is missed",
                "ReLU": "SwiGLU is missed",
                "multi-head": "grouped queries are missed",
            },
        ),
    ),
    Claim(
        id="D22",
        where="de 11",
        sentence="The standard improvements pay: Pre-LN, RMSNorm, RoPE, SwiGLU; GQA costs nothing.",
        settled_by=(
            *_pays(
                "original-to-modern",
                {"Pre-LN": "Pre-LN pays", "RMSNorm": "RMSNorm pays", "RoPE": "RoPE pays", "SwiGLU": "SwiGLU pays"},
            ),
            Compared(of="GQA costs nothing", study="original-to-modern", variant="GQA", expects="not worse"),
        ),
    ),
    Claim(
        id="D21",
        where="de 4, 8; ev 3.2",
        sentence="Usual sizes: 512/8/2048/6 with dropout .1; d/h of 512/8, 768/12, 1024/16.",
        settled_by=(
            Law(
                of="the presets have them and can be built",
                tests=tests(
                    "test_presets",
                    "test_the_original_is_the_papers_base_model",
                    "test_the_usual_widths_have_heads_of_64",
                ),
            ),
        ),
    ),
    Claim(
        id="D11",
        where="de 7, 8",
        sentence="Encoder, decoder, and encoder with decoder: each can be built, and trained on a task.",
        settled_by=(
            Learned(of="the decoder learns", study="architecture", variant="decoder", tasks=("reverse",)),
            Learned(
                of="the encoder–decoder learns",
                study="architecture",
                variant="encoder-decoder",
                tasks=("reverse", "sort"),
            ),
            Scored(
                of="the encoder is mostly right",
                study="architecture",
                variant="encoder",
                column="eval/in_distribution",
                at_least=HALF,
                tasks=("sort",),
            ),
            Law(
                of="they are torch's",
                tests=tests(
                    "components/test_architecture",
                    "test_two_stacks_are_torchs_encoder_and_decoder",
                    "test_one_stack_is_torchs_encoder_with_a_causal_mask_or_none",
                ),
            ),
        ),
    ),
)
