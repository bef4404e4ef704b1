"""Claims about mixtures of experts."""

from harness.claims.rules import Claim, Compared, Diagnosed, Law, Tabled, Unmeasured, tests

FAIR = 1.0  # MaxVio: no expert has more than twice its even share


def _balance(of: str, row: str, *, fair: bool = True) -> Tabled:
    """How far the fullest expert lies above its share at the end of training."""
    if fair:
        return Tabled(of=of, folder="moe", row=row, column="MaxVio", at_most=FAIR)
    return Tabled(of=of, folder="moe", row=row, column="MaxVio", at_least=FAIR)


CLAIMS = (
    Claim(
        id="E20",
        where="ev 6.2",
        sentence="8 experts, top-2: 8 times the parameters of the feed-forward, twice its FLOPs; compute is unchanged.",
        right="The first two are true, so compute is not unchanged: it doubles.",
        settled_by=(
            Law(
                of="8 times the parameters and twice the work",
                tests=(
                    *tests(
                        "components/test_feedforward",
                        "test_eight_experts_of_which_two_compute_are_eight_times_the_parameters_and_twice_the_work",
                    ),
                    *tests(
                        "test_presets",
                        "test_eight_experts_top_two_cost_eight_times_the_parameters_and_twice_the_operations",
                    ),
                ),
            ),
            Law(
                of="the compute is that of all experts that are chosen",
                tests=(
                    *tests(
                        "components/test_feedforward",
                        "test_the_operations_of_a_model_count_the_chosen_experts_alone",
                    ),
                    *tests("test_presets", "test_the_command_shows_what_experts_cost"),
                ),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="E21",
        where="ev 6.2",
        sentence="A balance coefficient of .01 balances the experts; .1 hurts the task.",
        right="A coefficient means little without the loss’s normalisation: here E·Σ f·p, a mean over layers (Switch).",
        settled_by=(
            Compared(of=".1 hurts", study="moe", variant="balance .1", expects="worse"),
            Compared(of=".01 does not hurt", study="moe", variant="balance .01", expects="not worse"),
            _balance("with .01 no expert has twice its share", "balance .01"),
        ),
    ),
    Claim(
        id="D07",
        where="de 12",
        sentence="Experts collapse; auxiliary loss, z-loss and jitter mend it, shared experts keep what is common.",
        settled_by=(
            _balance("without a balance loss an expert has twice its share", "no balance loss", fair=False),
            _balance("with z-loss and jitter none has", "z-loss, jitter"),
            Compared(of="z-loss and jitter do not hurt", study="moe", variant="z-loss, jitter", expects="not worse"),
            Compared(of="a shared expert is better", study="moe", variant="shared", expects="better"),
            Law(
                of="the auxiliary losses are their formulas",
                tests=tests(
                    "components/test_feedforward",
                    "test_auxiliary_losses_are_their_formulas",
                    "test_balance_is_one_when_uniform_and_the_number_of_experts_when_collapsed",
                ),
            ),
            Diagnosed(of="a balance loss left out is named", faults=("balance_left_out", "balance left out")),
            Diagnosed(of="an expert that is preferred is named", faults=("an expert preferred",)),
        ),
    ),
    Claim(
        id="D17",
        where="de 12",
        sentence="Of 8 experts top-2, 2/8 of all parameters are active; 50 B experts give 400 B with 50 B active.",
        right="With the shared expert 406 M of 1 217 M, not 304 M; top-2 of 50 B experts are 100 B active.",
        settled_by=(
            Law(
                of="the shared expert is active as well",
                tests=tests("test_presets", "test_active_parameters_count_the_shared_expert"),
                refutes=True,
            ),
            Law(
                of="two experts of 50 B are 100 B",
                tests=tests("test_presets", "test_the_command_shows_that_two_experts_of_50_billion_are_100"),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="D18",
        where="de 12",
        sentence="The table of mixtures: their sizes and how many experts each token has.",
        right="Mixtral has 46.7 B and 12.9 B active; Llama 4 Scout is top-1 with a shared expert, not top-2.",
        settled_by=(
            Law(
                of="Mixtral has its published sizes",
                tests=tests(
                    "test_presets", "test_mixtures_of_experts_have_their_published_sizes[mixtral-8x7b-46.7-12.9]"
                ),
            ),
            Law(
                of="Scout's sizes are those of top-1 and a shared expert",
                tests=tests(
                    "test_presets", "test_mixtures_of_experts_have_their_published_sizes[llama-4-scout-107.8-17.2]"
                ),
                refutes=True,
            ),
            Unmeasured(
                of="DeepSeek-V3 and Qwen4-MoE",
                needs="dense first layers and compressed queries in ModelSpec, and public weights",
            ),
        ),
    ),
)
