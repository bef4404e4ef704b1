"""Strict data: what a spec refuses and how it says so, the round trip, identity."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import specs

from harness.components.attention import SlidingWindow
from harness.components.position import ALiBi, Learned, NoPE, Position, RoPE, Sinusoidal, T5Bias
from harness.schema import Changes, Level, Spec, UserError, canonical_json, fingerprint, nearest
from harness.sources import ROOT, load_source
from harness.spec import ModelSpec, RunSpec, TrainSpec
from tasks import Copy, Lengths, Reverse, Task

RUN = RunSpec(task=Copy())


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document of `RUN` with anything at a dotted path."""
    document = json.loads(json.dumps(RUN.document()))
    *parents, name = path.split(".")
    inner = document
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    return document


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    ("model.d_model", "64", "should be a valid integer"),
    ("model.d_model", 64.0, "should be a valid integer"),
    ("model.d_model", True, "should be a valid integer"),
    ("model.d_model", 0, "greater than or equal to 1"),
    ("model.position", "RoPE", "expected a level of Position, e.g. "),
    ("model.position", None, "expected a level of Position, e.g. "),
    ("model.position", [1], "expected a level of Position, e.g. "),
    ("model.position", {"kind": "Rope"}, "unknown Position level 'Rope'; did you mean 'RoPE'? known: ALiBi"),
    ("model.position", {"kind": "Copy"}, "unknown Position level 'Copy'"),
    ("model.position", {"kind": "Position"}, "unknown Position level 'Position'"),
    ("model.position", {}, "its `kind` is missing; name a level of Position, e.g. "),
    ("model.position", {"base": 3.0}, "its `kind` is missing; name a level of Position, e.g. "),
    ("model.position.base", 1.0, "should be greater than 1"),
    ("model.position.base", float("nan"), "should be a finite number"),
    ("train.learning_rate", float("inf"), "should be a finite number"),
    ("train.learning_rate", 11.0, "less than or equal to 10"),
    ("train.learning_rate", "1e-3", "should be a valid number"),
    ("train.gradient_clip", 0.0, "should be greater than 0"),
    ("train.schedule.warmup", 1.0, "should be less than 1"),
    ("train.sampling", {"kind": "Finite", "num_samples": 0}, "greater than or equal to 1"),
    ("task", None, "expected a level of Task, e.g. "),
    ("task.num_symbols", 1, "greater than or equal to 2"),
    ("task.train_end_token", 1, "should be a valid boolean"),
    ("task.lengths.train", [1, 2, 3], "at most 2 items"),
    ("seed", -1, "greater than or equal to 0"),
    ("device", "gpu", "'cpu' or 'cuda'"),
]


@pytest.mark.parametrize(("path", "value", "words"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_is_no_such_value_is_one_sentence_with_its_path(path: str, value: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        RunSpec.parse(changed(path, value))
    message = str(caught.value)
    assert message.startswith(path)
    assert words in message
    assert "\n" not in message
    assert "pydantic" not in message


@pytest.mark.parametrize("path", ["model.d_model", "train.learning_rate", "task.num_symbols", "seed"])
def test_a_value_that_is_shown_is_the_one_that_was_given(path: str) -> None:
    with pytest.raises(UserError, match=rf"^{path} = 'many': "):
        RunSpec.parse(changed(path, "many"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.int64(64), "np.int64(64)"),
        (np.eye(2), "array([[1., 0.],        [0., 1.]])"),
        ("x" * 100, f"'{'x' * 58}…"),
        (NoPE(), "NoPE()"),
    ],
)
def test_any_value_is_shown_on_one_line_of_some_length(value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelSpec(d_model=value)
    reason = "input should be a valid integer; give a plain whole number, e.g. 3"
    assert str(caught.value) == f"ModelSpec.d_model = {said}: {reason}"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: SlidingWindow(window=0),
            "SlidingWindow.window = 0: input should be greater than or equal to 1; use at least 1",
        ),
        (
            lambda: ModelSpec(position={"kind": "RoPE", "base": 1.0}),  # type: ignore[arg-type]
            "ModelSpec.position.base = 1.0: input should be greater than 1; use more than 1",
        ),
        (
            lambda: TrainSpec(learning_rate=11.0),
            "TrainSpec.learning_rate = 11.0: input should be less than or equal to 10; use at most 10",
        ),
        (lambda: TrainSpec(beta1=1.0), "TrainSpec.beta1 = 1.0: input should be less than 1; use less than 1"),
        (
            lambda: TrainSpec(learning_rate="fast"),  # type: ignore[arg-type]
            "TrainSpec.learning_rate = 'fast': input should be a valid number; give a plain number, e.g. 0.5",
        ),
        (lambda: RunSpec(), "RunSpec.task: field required"),  # type: ignore[call-arg]
    ],
)
def test_what_is_refused_in_python_is_named_with_its_owner(make: Callable[[], Spec], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_level_that_is_only_named_is_written_out() -> None:
    with pytest.raises(UserError, match=r"^ModelSpec\.position = <class .*: expected a level .*; write RoPE\(\)$"):
        ModelSpec(position=RoPE)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"^position = 'rope': .*, e\.g\. RoPE\(\) \(as JSON .*; known: ALiBi, .*Learned"
    ):
        ModelSpec.parse({"position": "rope"})


def test_an_unknown_field_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"^trian = 3: there is no such field in RunSpec; did you mean 'train'\?"):
        RunSpec.parse(changed("trian", 3))


@pytest.mark.parametrize(
    ("path", "owner", "nearest_name"),
    [
        ("model.d_modle", "ModelSpec", "d_model"),
        ("model.position.bse", "Sinusoidal", "base"),
        ("train.schedule.wramup", "WarmupCosine", "warmup"),
        ("task.lengths.tset", "Lengths", "test"),
        ("task.symbols", "Copy", "num_symbols"),
    ],
)
def test_an_unknown_nested_field_is_named_with_its_owner(path: str, owner: str, nearest_name: str) -> None:
    with pytest.raises(UserError) as caught:
        RunSpec.parse(changed(path, 3))
    assert str(caught.value).startswith(
        f"{path} = 3: there is no such field in {owner}; did you mean {nearest_name!r}?"
    )


@pytest.mark.parametrize("kind", [5, None, ["RoPE"]])
def test_a_kind_that_is_no_name_is_a_user_error(kind: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.position"):
        RunSpec.parse(changed("model.position", {"kind": kind}))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "not json", '{"task": {"kind": "Copy"}} x'])
def test_text_that_is_no_document_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError) as caught:
        RunSpec.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "not json", "{'seed': 1}"])
def test_text_that_is_no_json_is_told_where(text: str) -> None:
    with pytest.raises(
        UserError, match=r"^this is not JSON \(.*: line 1 column \d .*\); mend it there, or name another"
    ):
        RunSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"seed": 1, "seed": 1}', "seed"),
        ('{"model": {"position": {"kind": "RoPE", "base": 3.0, "base": 5.0}}}', "model.position.base"),
        ('{"task": {"lengths": [{"a": 1}, {"a": 1, "a": {"b": 2}}]}}', "task.lengths.1.a"),
    ],
)
def test_a_key_that_stands_twice_is_named_by_its_path(text: str, path: str) -> None:
    with pytest.raises(UserError, match=rf"^{path}: this key stands twice in its object; remove one$"):
        RunSpec.parse(text)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UserError, match=r"^task: field required"):
        RunSpec.parse({})


def test_specs_are_frozen_and_keyword_only() -> None:
    with pytest.raises(UserError, match=r"^seed = 1: a spec stays as it is; .spec.replace"):
        RUN.seed = 1  # type: ignore[misc]
    with pytest.raises(UserError, match=r"^del seed: a spec stays as it is; .spec.replace"):
        del RUN.seed
    with pytest.raises(UserError, match=r"^sed: RunSpec has no field 'sed'; did you mean 'seed'"):
        RUN.sed = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^NoPE takes its fields by name, not 3; it has none$"):
        NoPE(3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^RoPE takes its fields by name, not 10.0; write RoPE\(base=10.0\)$"):
        RoPE(10.0)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="bse"):
        RoPE(bse=10.0)  # type: ignore[call-arg]


def test_keywords_are_as_strict_as_documents() -> None:
    for wrong in ({"d_model": "64"}, {"d_model": 64.0}, {"num_heads": 0}, {"position": ALiBi}, {"position": Copy()}):
        with pytest.raises(UserError):
            ModelSpec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        TrainSpec(learning_rate=float("nan"))
    assert str(caught.value) == "TrainSpec.learning_rate = nan: input should be a finite number"


IMPOSSIBLE: list[tuple[Callable[[], Spec], list[str]]] = [
    (lambda: ModelSpec(d_model=64, num_heads=6), ["num_heads = 6", "d_model = 64", "choose 4 or 8"]),
    (
        lambda: ModelSpec(d_model=30, num_heads=2, position=RoPE()),
        ["d_head (if not set, d_model / num_heads) = 15", "RoPE", "16 or 14"],
    ),
    (lambda: ModelSpec(d_model=15, num_heads=1), ["d_model = 15", "Sinusoidal", "choose 16 or 14"]),
    (
        lambda: ModelSpec(position=T5Bias(num_buckets=64, max_distance=20)),
        ["position.max_distance = 20", "num_buckets / 2 = 32", "raise max_distance or lower num_buckets"],
    ),
    (
        lambda: RunSpec(task=Copy(lengths=Lengths(train=(1, 10))), model=ModelSpec(position=Learned(max_length=8))),
        ["model.position = Learned takes 8 tokens", "has 22", "raise max_length to 22 or more"],
    ),
    (lambda: Lengths(train=(5, 4)), ["train = (5, 4)", "1 ≤ lo ≤ hi", "e.g. (1, 10)"]),
    (lambda: Lengths(train=(0, 4)), ["train = (0, 4)", "1 ≤ lo ≤ hi"]),
    (lambda: Lengths(train=(1, 4), test=(4, 5)), ["test = (4, 5)", "above 4"]),
]


@pytest.mark.parametrize(("make", "words"), IMPOSSIBLE, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_an_impossible_combination_names_field_value_and_remedy(make: Callable[[], Spec], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_the_nearest_name_is_offered_whatever_its_case() -> None:
    assert nearest("rope", ["RoPE", "ALiBi"]) == "did you mean 'RoPE'? known: ALiBi, RoPE"
    assert nearest("zzz", ["RoPE", "ALiBi"]) == "known: ALiBi, RoPE"
    assert nearest("zzz", []) == "known: none"


# --- paths -----------------------------------------------------------------------------------------------------------


def test_a_value_is_found_and_replaced_by_its_path() -> None:
    assert RUN.at("model.position.base") == 10_000
    other = RUN.replace("model.position.base", 500.0)
    assert other.at("model.position.base") == 500
    assert RUN.at("model.position.base") == 10_000
    assert other.replace("model.position.base", 10_000.0) == RUN
    assert RUN.replace("model.position", RoPE(base=7.0)).model.position == RoPE(base=7.0)
    assert RUN.replace("task.lengths.train", (1, 5)).task.lengths.train == (1, 5)
    assert RUN.replace("train.gradient_clip", None).train.gradient_clip is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model.position.bas", "Sinusoidal has no field 'bas'; did you mean 'base'?"),
        ("model.postion", "ModelSpec has no field 'postion'; did you mean 'position'?"),
        ("model.position.base.x", "10000.0 has no field 'x'"),
        ("model.position.kind", "Sinusoidal has no field 'kind'"),
        ("model.shape", "ModelSpec has no field 'shape'"),
        ("", "RunSpec has no field ''"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_user_error(path: str, words: str) -> None:
    for call in (lambda: RUN.at(path), lambda: RUN.replace(path, 1)):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).startswith(f"{path}: ")
        assert words in str(caught.value)


def test_a_replacement_is_validated_with_all_the_rest() -> None:
    with pytest.raises(UserError, match=r"^model: num_heads = 3 does not divide d_model = 64"):
        RUN.replace("model.num_heads", 3)
    with pytest.raises(UserError, match="takes 5 tokens"):
        RUN.replace("model.position", Learned(max_length=5))


def test_flat_gives_every_field_one_row_by_its_path() -> None:
    rows = RUN.replace("model.position", RoPE()).flat()
    assert rows["model.position"] == "RoPE"
    assert rows["model.position.base"] == 10_000
    assert rows["task"] == "Copy"
    assert rows["task.lengths.train"] == [1, 10]
    assert rows["seed"] == 0
    for path, value in rows.items():
        found = RUN.replace("model.position", RoPE()).at(path)
        assert (found.kind if isinstance(found, Level) else list(found) if isinstance(found, tuple) else found) == value


def test_specs_walks_all_that_is_inside() -> None:
    kinds = [spec.kind for spec in RUN.specs()]
    assert kinds[0] == "RunSpec"
    inside = {
        "ModelSpec",
        "TrainSpec",
        "Copy",
        "Lengths",
        "Sinusoidal",
        "LayerNorm",
        "WarmupCosine",
        "Fresh",
        "Fastest",
    }
    assert inside <= set(kinds)


# --- round trip ------------------------------------------------------------------------------------------------------


@given(specs(RunSpec))
def test_any_spec_survives_the_round_trip(spec: RunSpec) -> None:
    text = json.dumps(spec.document())
    for again in (RunSpec.parse(spec.document()), RunSpec.parse(text), RunSpec.model_validate_json(text)):
        assert again == spec
        assert hash(again) == hash(spec)
        assert again.document() == spec.document()
        assert again.fingerprint() == spec.fingerprint()
        assert [type(part) for part in again.specs()] == [type(part) for part in spec.specs()]


def test_whole_numbers_are_the_same_number_with_and_without_a_point() -> None:
    assert RoPE(base=500) == RoPE(base=500.0)
    assert fingerprint(RoPE(base=500)) == fingerprint(RoPE(base=500.0))


def test_levels_of_one_shape_are_different_specs() -> None:
    assert Copy() != Reverse()
    assert len({fingerprint(level) for level in (RoPE(), Sinusoidal(), NoPE(), ALiBi())}) == 4


data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=3), data, max_size=5), st.randoms(use_true_random=False))
def test_canonical_json_does_not_depend_on_order(document: dict[str, Any], random: Any) -> None:
    items = list(document.items())
    random.shuffle(items)
    text = canonical_json(document)
    assert canonical_json(dict(items)) == text
    assert json.loads(text) == document


def test_canonical_json_has_no_spaces_and_no_nan() -> None:
    assert canonical_json({"b": [1, 2], "a": {"d": 1.0, "c": None}}) == '{"a":{"c":null,"d":1.0},"b":[1,2]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


# --- identity --------------------------------------------------------------------------------------------------------


def in_process(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    env = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    spec = RUN.replace("model.position", RoPE(base=77.0)).replace("task", Reverse(num_symbols=5))
    code = f"""
        from harness.spec import RunSpec
        print(RunSpec.parse({json.dumps(spec.document())!r}).fingerprint())
    """
    assert in_process(code, PYTHONHASHSEED="1234") == spec.fingerprint()
    assert len(spec.fingerprint()) == 16
    assert int(spec.fingerprint(), 16) >= 0


def test_a_raised_result_version_changes_the_fingerprint_of_what_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    using, other = RUN.replace("model.position", RoPE()), RUN.replace("model.position", ALiBi())
    before = using.fingerprint(), other.fingerprint()
    monkeypatch.setattr(RoPE, "result_version", RoPE.result_version + 1)
    assert using.fingerprint() != before[0]
    assert other.fingerprint() == before[1]
    monkeypatch.setattr(TrainSpec, "result_version", TrainSpec.result_version + 1)
    assert other.fingerprint() != before[1]


def test_a_raised_result_version_of_a_base_changes_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copy, "result_version", 2)
    before = RUN.fingerprint()
    monkeypatch.setattr(Task, "result_version", 2)
    assert RUN.fingerprint() != before


def test_a_new_level_stales_nothing() -> None:
    before = RUN.fingerprint(), RUN.replace("model.position", RoPE()).fingerprint()

    class Another(RoPE):
        """Another."""

        result_version = 7

    assert (RUN.fingerprint(), RUN.replace("model.position", RoPE()).fingerprint()) == before
    assert fingerprint(Another()) != fingerprint(RoPE())


def test_levels_are_the_concrete_classes_and_the_latest_of_a_name() -> None:
    assert {"NoPE", "Sinusoidal", "Learned", "RoPE", "ALiBi", "T5Bias"} <= set(Position.levels())
    assert "Position" not in Position.levels()
    assert {"Copy", "Reverse"} <= set(Task.levels())
    assert RoPE.levels()["RoPE"] is RoPE

    def redefined(number: int) -> type[NoPE]:
        class Redefined(NoPE):
            """Each definition with another default."""

            value: int = number

        return Redefined

    first, second = redefined(1), redefined(2)
    assert Position.levels()["Redefined"] is second
    assert Position.parse({"kind": "Redefined"}) == second()
    assert second() != first()


# --- users' own ------------------------------------------------------------------------------------------------------

OWN_LEVEL = """
    from typing import Annotated

    from harness.components.position import Position, PositionEncoding
    from harness.schema import Changes, Level


    class {name}(Position):
        "A user's own."

        strength: Annotated[float, Changes("outputs")] = 0.5
        bands: tuple[int, ...] = (1, 2)
        inner: Position | None = None

        def build(self, shape):
            return PositionEncoding()
"""


def own(folder: Path, name: str, text: str = OWN_LEVEL, file: str = "mine.py") -> ModuleType:
    path = folder / file
    path.write_text(textwrap.dedent(text.replace("{name}", name)))
    return load_source(path)


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # load_source lets a file import its neighbours


def test_a_users_level_is_written_as_itself_with_its_fields(tmp_path: Path) -> None:
    level = own(tmp_path, "Banded").Banded
    spec = RunSpec(task=Copy(), model=ModelSpec(position=level(strength=0.25)))
    assert spec.document()["model"]["position"] == {"kind": "Banded", "strength": 0.25, "bands": [1, 2], "inner": None}


def test_all_a_users_fields_survive_parsing(tmp_path: Path) -> None:
    level = own(tmp_path, "Striped").Striped
    mine = level(strength=0.25, bands=(3, 4, 5), inner=RoPE(base=3.0))
    spec = RUN.replace("model.position", mine)
    again = RunSpec.parse(json.dumps(spec.document()))
    assert again == spec
    assert again.model.position == mine
    assert again.fingerprint() == spec.fingerprint()


def test_a_users_own_fields_enter_the_fingerprint(tmp_path: Path) -> None:
    level = own(tmp_path, "Tuned", OWN_LEVEL.replace("bands: tuple[int, ...] = (1, 2)", "")).Tuned
    made = [level(), level(strength=0.25), level(inner=NoPE()), level(inner=RoPE()), level(inner=RoPE(base=3.0))]
    runs = [RUN.replace("model.position", position) for position in made]
    assert len({run.fingerprint() for run in runs}) == len(made)
    assert [RunSpec.parse(run.document()) for run in runs] == runs
    with pytest.raises(UserError, match=r"^model\.position\.strength = 'x': input should be a valid number"):
        RUN.replace("model.position", {"kind": "Tuned", "strength": "x"})


def test_the_text_of_a_users_file_enters_the_fingerprint(tmp_path: Path) -> None:
    text = OWN_LEVEL.replace("bands: tuple[int, ...] = (1, 2)", "")

    def run(text: str) -> str:
        own(tmp_path, "Edited", text)
        return RunSpec.parse(changed("model.position", {"kind": "Edited"})).fingerprint()

    first, second = run(text), run(text.replace("return Pos", "return (lambda: 1) and Pos"))
    assert first != second
    assert run(text) == first


def test_the_text_of_a_users_base_class_enters_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from neighbour import Base\n\n\nclass Derived(Base):\n    pass\n")
    found = []
    for number in (1, 2):
        body = f"class Base(Level):\n    def answer(self):\n        return {number}\n"
        (tmp_path / "neighbour.py").write_text(f"from harness.schema import Level\n\n\n{body}")
        code = f"""
            from harness.schema import fingerprint
            from harness.sources import load_source
            print(fingerprint(load_source({str(tmp_path / "mine.py")!r}).Derived()))
        """
        found.append(in_process(code, PYTHONDONTWRITEBYTECODE="1"))
    assert found[0] != found[1]


def test_a_users_task_works_in_a_run_spec(tmp_path: Path) -> None:
    text = """
        from tasks import Copy


        class {name}(Copy):
            repeats: int = 2

            def answer(self, source):
                return source.repeat(1, self.repeats)

            def oracle(self, source):
                return source * self.repeats
    """
    task = own(tmp_path, "Echo", text).Echo
    spec = RunSpec(task=task(repeats=3))
    assert RunSpec.parse(spec.document()) == spec
    assert spec.task.tokens(4) == 1 + 4 + 1 + 12
    assert spec.fingerprint() != RunSpec(task=task()).fingerprint()


def test_a_subclass_of_what_is_no_axis_is_refused_rather_than_cut() -> None:
    def run() -> RunSpec:
        class Extended(TrainSpec):
            extra: Annotated[int, Changes("updates")] = 1

        return RunSpec(task=Copy(), train=Extended(extra=2))

    with pytest.raises(UserError, match="TrainSpec"):
        run()


def test_changes_is_a_marker_of_known_kinds() -> None:
    known = set(get_args(Changes.__annotations__["what"]))
    with pytest.raises(UserError, match=r"^Changes\('output'\): .*did you mean 'outputs'\? known: data, "):
        Changes("output")  # type: ignore[arg-type]
    assert known == {"parameters", "outputs", "loss", "data", "schedule", "updates", "evaluation", "hardware"}
