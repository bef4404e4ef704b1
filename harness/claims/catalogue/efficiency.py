"""Claims about time and memory: kernels, windows, caches."""

from harness.claims.rules import Claim, Compared, Diagnosed, Law, Tabled, Unmeasured, tests

LINEAR = 1.25  # at most: a fitted exponent of what grows with n
SQUARE = 1.7  # at least: one of what grows with n², lesser terms included
FASTER = 1.1  # at least: a ratio of times that is more than noise
TIMES = "exponent of time"
MEMORY = "of memory"


def _grows(of: str, row: str, column: str, *, square: bool = False) -> Tabled:
    """An exponent of `make bench-attention`, of n or of n²."""
    if square:
        return Tabled(of=of, folder="bench-attention", row=row, column=column, at_least=SQUARE)
    return Tabled(of=of, folder="bench-attention", row=row, column=column, at_most=LINEAR)


def _decodes_faster(row: str, cached: str) -> Tabled:
    """Time of multi-head attention by that of a variant, for one token after so many cached ones."""
    return Tabled(
        of=f"{row} decodes faster after {int(cached.replace(',', ''))} tokens",
        folder="bench-attention",
        row="multi-head",
        over=row,
        column=cached,
        at_least=FASTER,
    )


CLAIMS = (
    Claim(
        id="E15",
        where="ev 5.4, de 10",
        sentence="FlashAttention is exact, takes O(n) memory, and is 2–4 times as fast.",
        settled_by=(
            _grows("memory of the fused kernel grows with n", "multi-head", MEMORY),
            _grows("explicit memory grows with n²", "explicit (no flash)", MEMORY, square=True),
            Law(
                of="it is exact",
                tests=(
                    *tests("components/test_attention", "test_fused_attention_is_the_explicit_form"),
                    *tests("components/test_kernel", "test_the_math_kernel_is_explicit_and_gives_the_same"),
                ),
            ),
            Law(
                of="it stores no scores",
                tests=tests("components/test_attention", "test_flash_stores_no_scores"),
            ),
            Unmeasured(of="2–4 times as fast", needs="both kernels timed at one length on a GPU"),
        ),
    ),
    Claim(
        id="E39",
        where="ev 2.3, 5.1",
        sentence="A head's score matrix has 4 M elements at n = 2048, 67 M at 8192, 1 G at 32 768.",
        right="The sizes are right; 67 M elements are 128 MiB in fp16: not yet an explosion.",
        settled_by=(Law(of="these are the sizes", tests=tests("test_presets", "test_score_matrices_of_one_head")),),
    ),
    Claim(
        id="D15",
        where="de 10",
        sentence="Attention costs n²d against nd² of the rest, and is the bottleneck once n exceeds d.",
        right="The orders are right; with projections and d_ff = 4d attention overtakes the rest at n = 6d.",
        settled_by=(
            _grows("time grows with n²", "multi-head", TIMES, square=True),
            Law(
                of="operations grow with n²",
                tests=tests("test_cost", "test_operations_are_quadratic_in_length"),
            ),
            Law(
                of="attention overtakes the rest at n = 6d and not at d",
                tests=(
                    *tests("test_cost", "test_attention_overtakes_the_rest_at_six_times_the_width"),
                    *tests("test_presets", "test_the_command_shows_where_attention_overtakes_the_rest"),
                ),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="E16",
        where="ev 5.2",
        sentence="A window costs O(n·w), and fails at exact retrieval from afar.",
        right="Afar is beyond layers × (w − 1) tokens, which is how far back a window sees.",
        settled_by=(
            Compared(
                of="a window of 4 fails beyond its reach",
                study="window",
                variant="window 4",
                expects="worse",
                tasks=("4 pairs back", "8 pairs back"),
            ),
            Compared(
                of="a window of 6 fails beyond its reach",
                study="window",
                variant="window 6",
                expects="worse",
                tasks=("8 pairs back",),
            ),
            Compared(
                of="a window of 8 fails beyond its reach",
                study="window",
                variant="window 8",
                expects="worse",
                tasks=("8 pairs back",),
            ),
            _grows("time grows with n", "sliding window", TIMES),
            _grows("memory grows with n", "sliding window", MEMORY),
            Law(
                of="the reach is layers × (w − 1)",
                tests=(
                    *tests("components/test_attention", "test_the_reach_is_layers_times_window"),
                    *tests("test_reach", "test_a_real_model_hears_of_a_value_within_reach_and_of_none_beyond"),
                ),
            ),
        ),
    ),
    Claim(
        id="E42",
        where="ev 5.2",
        sentence="Window, global and random keys together (BigBird) approach full attention.",
        settled_by=(
            Compared(
                of="as good as full attention",
                study="attention",
                variant="window + global + random",
                expects="equivalent",
            ),
        ),
    ),
    Claim(
        id="E17",
        where="ev 5.3",
        sentence="Linear attention costs O(n·d²), approximates softmax by a kernel, and is less expressive.",
        right="elu + 1 does not approximate softmax, and the printed formula lacks the normaliser.",
        settled_by=(
            Compared(of="less expressive", study="attention", variant="linear", expects="worse"),
            _grows("time grows with n", "linear", TIMES),
            _grows("memory grows with n", "linear", MEMORY),
            Law(
                of="its kernel does not approximate softmax",
                tests=tests("components/test_attention", "test_linear_attention_does_not_approximate_a_softmax"),
                refutes=True,
            ),
            Law(
                of="it needs the normaliser",
                tests=tests("components/test_attention", "test_linear_attention_is_the_sum_with_its_normaliser"),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="E18",
        where="ev 6.1",
        sentence="The KV cache of 32 heads of 128, 4096 tokens, fp16, is 64 MiB a layer; with 8 KV heads a quarter.",
        settled_by=(
            Law(
                of="real caches have these bytes",
                tests=(
                    *tests(
                        "components/test_cache",
                        "test_the_articles_cache_is_64_mib_a_layer_and_a_quarter_with_eight_key_heads",
                        "test_bytes_held_are_what_the_level_says",
                    ),
                    *tests("test_presets", "test_the_key_value_cache_of_the_article"),
                ),
            ),
        ),
    ),
    Claim(
        id="E19",
        where="ev 6.1, de 4",
        sentence="Against multi-head attention grouped queries lose almost nothing, and one key-value head a little.",
        settled_by=(
            Compared(of="grouped-query is as good", study="attention", variant="grouped-query", expects="equivalent"),
            Compared(
                of="multi-query is nearly as good", study="attention", variant="multi-query", expects="equivalent"
            ),
        ),
    ),
    Claim(
        id="E38",
        where="ev 6.1, de 4",
        sentence="Grouped and single key-value heads speed up decoding.",
        settled_by=tuple(
            _decodes_faster(row, cached)
            for row in ("grouped-query", "multi-query")
            for cached in ("256", "1,024", "4,096", "16,384")
        ),
    ),
    Claim(
        id="E31",
        where="ev 7.3",
        sentence="Gradient checkpointing trades time for memory.",
        settled_by=(
            Law(
                of="it saves memory and changes no number",
                tests=tests(
                    "test_transformer", "test_recomputation_saves_memory", "test_recomputation_changes_no_number"
                ),
            ),
            Law(
                of="it costs a second forward pass",
                tests=tests("test_presets", "test_a_runs_second_forward_pass_is_counted_as_in_its_ledger"),
            ),
        ),
    ),
    Claim(
        id="D06",
        where="de 13",
        sentence="Latent attention (MLA) compresses the cache 4 to 8 times.",
        right="The article's own numbers give 8192 / 512 = 16, and 14.2 with the decoupled RoPE key.",
        settled_by=(
            Law(
                of="16 times or 14.2 with the rotated key",
                tests=(
                    *tests("components/test_cache", "test_the_latent_cache_of_the_derivation"),
                    *tests(
                        "test_presets",
                        "test_latent_attention_compresses_sixteenfold_before_its_rotated_key",
                        "test_the_command_shows_a_compressed_cache",
                    ),
                ),
                refutes=True,
            ),
        ),
    ),
    Claim(
        id="D19",
        where="de 13",
        sentence="The printed code of latent attention decodes with its cache.",
        right="It ignores `kv_cache` and has no mask. Reading with a cache must give the logits of reading at once.",
        settled_by=(
            Diagnosed(
                of="a cache that is not used is a fault", faults=("cache_not_used", "cache_forgets"), refutes=True
            ),
            Diagnosed(of="a missing mask is a fault", faults=("no_mask",), refutes=True),
        ),
    ),
)
