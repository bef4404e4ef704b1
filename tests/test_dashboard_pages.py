"""What the dashboard's links show, in a real browser: Debian's chromium, driven by playwright.

HARNESS_SCREENSHOTS=DIR keeps a picture of every page there; else they lie in pytest's temporary folder.
HARNESS_SEEDS=20 compares 500 runs rather than 50, which takes minutes to write.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from harness.dashboard import dashboard
from harness.record import RunRecord, Score
from harness.spec import ModelSpec, RunSpec
from harness.tracking import Mirror, default_uri
from tasks import Copy

ROOT = Path(__file__).parents[1]
VARIANTS = ("none", "sinusoidal", "rope")
SEEDS = int(os.environ.get("HARNESS_SEEDS", "2"))
PATIENCE = 120_000  # ms until a page shows what it should: CI's machines are shared
HARMLESS = (
    "404",
    "ResizeObserver",
)  # MLflow asks for the user of a server that has none; plotly's charts measure themselves
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
OPTIONS += ["--disable-sync", "--no-first-run"]
# As for somebody who closed MLflow's assistant before: it covers a quarter of the first page. Frames have no storage.
ASSISTANT = "top === self && localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:mlflow\..*")]


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    assert chromium, "these tests need a browser: install it with `apt-get install chromium`"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A study that was really run, and the dashboard on its store."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "encodings.py").write_text(
        "from small_study import LENGTHS, small\n"
        "from tasks import Copy\n"
        "from harness.study import Budget\n"
        "budgets = {'smoke': Budget(seeds=2, changes={'train.steps': 60})}\n"
        "ablation = small(tasks={'copy': Copy(lengths=LENGTHS)}, budgets=budgets)\n"
    )
    command = [sys.executable, "-m", "harness", "ablate", str(folder / "encodings.py"), "--budget", "smoke"]
    command += ["--results", str(folder / "results"), "--jobs", "1"]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    done = subprocess.run(command, env=paths, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with dashboard(folder / "results") as served:
        yield served


@pytest.fixture
def visit(request, browser, tmp_path):
    """Opens the link whose text begins so; afterwards keeps a picture and looks at what the page complained of."""
    context = browser.new_context(viewport={"width": 1500, "height": 1000})
    context.set_default_timeout(PATIENCE)
    context.add_init_script(ASSISTANT)
    complaints, opened = [], []

    def open_link(text, served=None):
        served = served or request.getfixturevalue("shown")
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(next(link.address for link in served.links if link.text.startswith(text)))
        opened.append((text, page))
        return page

    yield open_link
    for text, page in opened:
        if not page.is_closed():
            picture(page, text, tmp_path)
    context.close()
    assert [text for text in complaints if not any(known in text for known in HARMLESS)] == []


def picture(page, text, tmp_path):
    folder = Path(os.environ.get("HARNESS_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{re.sub(r'[^a-z0-9]+', '-', text.lower())}.png", timeout=PATIENCE)


def sees(page, *texts):
    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible(timeout=PATIENCE)


def points(page):
    """How many points the charts' lines have, with something plotted in each."""
    page.wait_for_function("document.querySelectorAll('.js-line').length > 0", timeout=PATIENCE)
    lines = page.eval_on_selector_all(".js-line", "lines => lines.map(line => line.getAttribute('d') || '')")
    return [line.count(",") for line in lines]


def test_the_table_shows_every_run_unfolded_with_its_score_and_what_differs(visit):
    page = visit("every run, best first")
    sees(page, *(f"{variant} · copy · seed {seed}" for variant in VARIANTS for seed in (0, 1)))
    sees(page, "model.position", "eval/extrapolation", "Sinusoidal", "NoPE", "RoPE")


def test_loss_curves_of_all_variants_lie_in_one_chart(visit):
    page = visit("loss curves")
    sees(page, *(f"{variant} · copy · seed 0" for variant in VARIANTS), "Curves of all variants")
    assert max(points(page)) >= 6  # the loss of 60 steps, every ten
    drawn = page.locator(".js-plotly-plot").first
    assert drawn.locator(".scatterlayer .trace").count() >= len(VARIANTS)


def test_what_differs_is_the_axis_and_nothing_else(visit):
    page = visit("parameters that differ")
    sees(page, "model.position", *(f"{variant} · copy · seed 0" for variant in VARIANTS), "NoPE")
    assert page.get_by_text("model.norm", exact=True).count() == 0


def test_attention_maps_are_pictures_that_change_with_the_slider(visit):
    page = visit("attention maps")
    image = page.locator("img[src*='attention~maps'], img[src*='attention%7Emaps'], img[src^='blob:']")
    expect(image.first).to_be_visible(timeout=PATIENCE)
    loaded = "images => images.length > 0 && images.every(image => image.complete && image.naturalWidth > 0)"
    assert image.evaluate_all(loaded)
    before = image.first.get_attribute("src")
    page.get_by_role("slider").first.press("ArrowRight")
    page.wait_for_function(
        "before => [...document.images].every(image => image.src !== before && image.complete)", arg=before
    )


def test_a_run_says_what_is_wrong_with_it(visit, shown):
    page = visit("diagnosis of")
    name = next(link.text for link in shown.links if link.text.startswith("diagnosis of"))
    sees(page, re.match("diagnosis of (.*): ", name)[1], "diagnosis", "Description")
    page.get_by_text("Description", exact=True).first.scroll_into_view_if_needed()
    sees(page, "Likely cause")


def test_the_study_shows_its_answer_and_its_figures(visit):
    page = visit("the study")
    page.get_by_text("Description", exact=True).first.scroll_into_view_if_needed()
    sees(page, "Does it matter?")
    figure = page.locator("img[src*='get-artifact']").first
    figure.scroll_into_view_if_needed()
    page.wait_for_function("[...document.images].some(i => i.src.includes('get-artifact') && i.naturalWidth > 0)")


def test_the_report_is_a_link_away(visit):
    page = visit("the report")
    expect(page.frame_locator("iframe").get_by_text("Does it matter?").first).to_be_visible(timeout=PATIENCE)


def test_runs_stand_side_by_side_with_all_their_parameters(visit):
    page = visit("all variants on copy side by side")
    sees(page, *(f"{variant} · copy · seed 0" for variant in VARIANTS), "model.position")


# Many runs


def crowd(results, variants=25, seeds=SEEDS):
    """A study of many runs, written without training, and its store."""
    names = [f"base {100 * number}" for number in range(1, variants + 1)]
    folder, planned, began = results / "crowd", [], 1_700_000_000
    for number, (seed, name) in enumerate(itertools.product(range(seeds), names)):
        spec = RunSpec(model=ModelSpec(d_model=16 + 8 * names.index(name)), task=Copy(), seed=seed).document()
        path = folder / "runs" / f"{number:016x}"
        path.mkdir(parents=True)
        lines = [{"step": step, "time": 1000 * began + step, "train/loss": 3 / step} for step in range(10, 210, 10)]
        (path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        scores = [Score(length=length, metric="exact_match", value=1 / length) for length in range(1, 21)]
        final = {"eval/extrapolation": number / 1000, "eval/in_distribution": 1.0}
        outcome = {"scores": scores, "final": final, "ledger": {"steps": 200}, "environment": {"cpu": "A processor"}}
        times = {"started": began, "ended": began + 60}
        record = RunRecord(fingerprint=path.name, spec=spec, status="finished", cause="", **outcome, **times)
        record.write(path / "record.json")
        planned.append({"variant": name, "task": "copy", "seed": seed, "fingerprint": path.name})
    document = {"study": "crowd", "question": "How many?", "claims": [], "axes": ["model.d_model"], "commit": ""}
    document |= {
        "baseline": names[0],
        "variants": names,
        "tasks": ["copy"],
        "seeds": list(range(seeds)),
        "runs": planned,
    }
    document |= {
        "budget": "full",
        "score": "exact_match",
        "margin": 0.1,
        "command": "harness ablate",
        "environment": {},
    }
    document |= {"differences": {name: {"model.d_model": str(16 + 8 * i)} for i, name in enumerate(names) if i}}
    (folder / "study.json").write_text(json.dumps(document))
    assert Mirror(default_uri(results), folder).deliver() == variants * seeds


def test_hundreds_of_runs_can_be_compared(results, visit, capsys):
    began = time.monotonic()
    crowd(results)
    said = [f"{25 * SEEDS} runs: delivered in {time.monotonic() - began:.0f} s"]
    with dashboard(results) as served:
        for text, first in (
            ("every run", f"base 2500 · copy · seed {SEEDS - 1}"),
            ("loss curves", "base 100 · copy · seed 0"),
        ):
            began = time.monotonic()
            page = visit(text, served)
            sees(page, first)
            shows = f"{text}: names after {time.monotonic() - began:.1f} s"
            if text == "loss curves":
                assert max(points(page)) >= 1
                shows += f", curves after {time.monotonic() - began:.1f} s"
            said.append(shows)
            picture(page, f"{25 * SEEDS} runs {text}", results)
            page.close()  # its server ends before the fixture does, and the page would complain
    with capsys.disabled():
        sys.stdout.write("\n" + "; ".join(said) + "\n")
