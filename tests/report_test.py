"""`lockstep report` on folders of runs, and its page in headless Chromium where there is one."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

LOCKSTEP = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")) / "lockstep"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GAP = "train/train_rollout_logprob_abs_diff"


def report(*arguments):
    return subprocess.run([LOCKSTEP, "report", *map(str, arguments)], capture_output=True, text=True)


def write_run(folder, arm, seed, level):
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(f'# contract 00000000000000aa\narm = "{arm}"\nseed = {seed}\n')
    with open(folder / "metrics.jsonl", "w") as out:
        for step in range(1, 31):
            line = {"step": step, "critic/rewards/mean": 0.5 + 0.1 * seed, GAP: level * seed,
                    f"{GAP}/p99": 20 * level, "timing_s/gen": 1.0, "timing_s/step": 2.5,
                    "perf/total_num_tokens": 1000, "fp4/guide/covered_frac": 1}
            line |= {f"fp4/act/value_flip_frac/layer_{i}": 0.05 * i for i in range(4)}
            print(json.dumps(line), file=out)


@pytest.fixture
def runs(tmp_path):
    for arm, level in [("naive", 0.2), ("trace", 0.01)]:
        for seed in [1, 2]:
            write_run(tmp_path / "study" / arm / f"seed_{seed}", arm, seed, level)
    return tmp_path / "study"


def test_report_lies_in_the_runs_folder(runs, tmp_path):
    done = report(runs, "--figures", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    page = (runs / "report.html").read_text()
    assert done.stdout.strip() == f"Report:  {runs / 'report.html'}"
    assert "2 seeds" in page and 'class="band c1"' in page
    assert "trainer and rollout differ by" in page  # naive's verdict, as the run would have said it
    assert {"reward.svg", "gap.svg", "flips_trace_act.svg"} <= {p.name for p in (tmp_path / "figures").iterdir()}


def test_a_report_of_several_lies_in_the_folder_that_holds_them(runs, tmp_path):
    for some, page in ((["naive", "trace"], "report_naive_trace.html"),
                       (["naive/seed_1", "trace/seed_2"], "report_seed_1_seed_2.html"),
                       (["naive/seed_1", "naive/seed_2"], "naive/report_seed_1_seed_2.html")):
        done = report(*[runs / one for one in some])
        assert done.stdout.strip() == f"Report:  {runs / page}" and (runs / page).exists()
    assert not (runs / "report.html").exists()


@pytest.mark.parametrize("make, says", [
    (lambda folder: None, "there is no run"),
    (lambda folder: folder.mkdir(), "has no metrics.jsonl"),
    (lambda folder: (folder.mkdir(), (folder / "metrics.jsonl").write_text("{")), "has no line"),
])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, make, says):
    folder = tmp_path / "it"
    make(folder)
    done = report(folder)
    assert done.returncode != 0
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "report.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_page_runs_in_a_browser(runs, tmp_path):
    assert report(runs).returncode == 0
    page = runs / "report.html"
    # Points at the gap's chart and writes down what the page then tells.
    poke = """<script>addEventListener("load", () => {
      const svg = document.querySelectorAll(".plot svg")[1], box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 20, clientY: box.top + 20, bubbles: true}));
      document.body.dataset.wide = String(document.documentElement.scrollWidth > innerWidth);
      document.body.dataset.tip = document.getElementById("tip").innerText;
    });</script></body>"""
    poked = tmp_path / "poked.html"
    poked.write_text(page.read_text().replace("</body>", poke))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=500,900",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{poked}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=180).stdout
    body = dom[dom.index("<body"):dom.index("<main")]
    assert "step" in body and "naive" in body and "trace" in body
    assert 'data-wide="false"' in body  # nothing hangs over the edge of a narrow window
