"""The page of a sweep: whole, escaped, asking for nothing from anywhere, and each of its numbers leads to its runs."""

import base64
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from by_hand import RECORDS, WORDS, plan, record
from conftest import andrea, make
from matplotlib.image import imread

from andrea_exp import ROOT
from andrea_exp.compose import words_of
from andrea_exp.record import MetricsWriter, provenance, run_folder, write_json
from andrea_exp.results.claims import read_claims
from andrea_exp.results.figures import figures_of
from andrea_exp.results.page import page_of
from andrea_exp.sweep.plan import Plan, plan_sweep

pytestmark = pytest.mark.usefixtures("empty_folder")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '<script>alert("1")</script>'
TURNED = "\u202e\u2066\x07"  # text runs backwards, or is no HTML
NAMES = (EVIL, "نوع أول & 'x'", f"a|b{TURNED} «ü» 模型", "--><style>*{display:none}</style> $x_$")
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Document(HTMLParser):
    """A page as a parser sees it. Raises AssertionError where an element is not closed as it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def awkward(seeds: int = 3, **roles: Any) -> Plan:
    """Arms, question and comment with whatever HTML must escape."""
    arms = {name: {"optim.lr": (i + 1) / 1000} for i, name in enumerate(NAMES)}
    plan(arms, repeat={"seed": list(range(seeds))}, **roles)
    path = Path("sweeps/tiny.yaml")
    spec = path.read_text().replace("Does it?", f"A & B < C, \\\"quoted\\\", 'or' {EVIL.replace(chr(34), '')}?")
    path.write_text(f"# @package _global_\n# Question: {EVIL} & <b>bold</b>\n#   indented — ü\n{spec}")
    return plan_sweep(["sweeps=tiny", *(w for w in WORDS if "optim.lr" not in w)])


def fill(planned: Plan, number: int | None = None) -> None:
    """Runs as the trainer leaves them: metrics, provenance and summary."""
    for i, cell in enumerate(planned.cells[:number]):
        record(cell, 2.0 + i / 100)
        folder = run_folder(RECORDS, cell.signature)
        writer = MetricsWriter(folder)
        for step in range(1, 7):
            writer.write({"step": step, "train/loss": 3 / step, "grad_norm/block_00/mlp": 0.1, "time": 0.0})
        writer.close()
        ran = {"device": {"type": "cpu", "name": "CPU <4>"}, "threads": 1 + i % 2, "ops": {"gelu": "reference"}}
        write_json(folder / "provenance.json", provenance(folder, cell.config, cell.fingerprint, 0, **ran))


def page(planned: Plan) -> str:
    return page_of(planned, RECORDS, [planned.name, *WORDS], figures_of(planned, RECORDS))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, str]:
    """A sweep of awkward names whose runs have all ended, and its page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        planned = awkward(across={"optim.warmup_steps": [0, 4, 5, 6]})
        fill(planned)
        first, second = page(planned), page(planned)
    assert first == second  # the same records give the same page
    return planned, first


def test_it_is_whole_html_whatever_the_names(whole: tuple[Plan, str]):
    _, html = whole
    document = Document(html)
    assert html.startswith("<!DOCTYPE html>\n")
    assert document.all("html") == [{"lang": "en"}]
    assert len(document.all("title")) == len(document.all("h1")) == len(document.all("main")) == 1
    assert document.all("script") == []
    assert len(document.all("style")) == 1
    assert "<b>" not in html
    assert not set(TURNED) & set(html)
    text = "".join(document.text)
    for name in (*NAMES, f"Question: {EVIL} & <b>bold</b>\n  indented — ü", "A & B < C, \"quoted\", 'or'"):
        assert name.replace(TURNED, "") in text
    levels = [int(tag[1]) for tag, _ in document.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(attrs["scope"] for attrs in document.all("th") if "data-runs" not in attrs and attrs)


def test_it_asks_for_nothing_from_anywhere(whole: tuple[Plan, str]):
    _, html = whole
    document = Document(html)
    assert {"http-equiv": "Content-Security-Policy"}.items() <= document.all("meta")[1].items()
    for tag, attrs in document.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster", "style"):
            value = attrs.get(name) or ""
            assert value.startswith(("#", "data:")) or name == "style" or not value, (tag, attrs)
            assert "url(" not in value
    assert "@import" not in html
    assert document.all("img")
    assert all(attrs["alt"] for attrs in document.all("img"))


def test_every_number_leads_to_its_runs_and_they_to_their_commands(whole: tuple[Plan, str]):
    planned, html = whole
    document = Document(html)
    ids = [attrs["id"] for _, attrs in document.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    links = [attrs["href"][1:] for attrs in document.all("a")]  # type: ignore[index]
    assert set(links) <= set(ids)
    assert len(links) == len(planned.arms) * len(planned.columns)
    bodies = {anchor: html.split(f'id="{anchor}"')[1].split("</tbody>")[0] for anchor in links}
    for place, anchor in enumerate(links):
        own = planned.cells[3 * place : 3 * place + 3]
        assert re.findall(r"<code>([0-9a-f]{16})</code>", bodies[anchor]) == [c.signature for c in own]
        commands = re.findall(r"<code>andrea-exp train (.*?)</code>", bodies[anchor])
        assert len(commands) == 3
        assert plan_sweep(commands[-1].split()).cells[0].signature == own[-1].signature


def test_a_partial_sweep_says_so_before_anything_else():
    planned = awkward()
    fill(planned, 5)
    before, _, _ = page(planned).partition("What was asked")
    assert "Partial." in before
    assert "5 of 12 runs have ended" in before
    fill(planned)
    assert "Partial." not in page(planned)


def test_a_sweep_that_tunes_says_who_waits_and_lists_the_runs_that_chose():
    planned = plan(tune={"optim.lr": [1e-3, 1e-2], "seed": [9]})
    fill(planned)
    html = page(planned)
    assert "9 more wait for the tuning runs" in html
    planned = plan(tune={"optim.lr": [1e-3, 1e-2], "seed": [9]})
    fill(planned)
    html = page(planned)
    assert "Partial." not in html
    assert {c.signature for c in planned.cells} == set(re.findall(r"<code>([0-9a-f]{16})</code>", html))
    assert html.count("<td>tune</td>") == 6


def test_provenance_counts_the_runs_where_they_differ():
    planned = awkward()
    fill(planned)
    html = page(planned)
    assert '<th scope="row">threads</th><td>1 (6 runs); 2 (6 runs)</td>' in html
    assert '<th scope="row">device</th><td>cpu CPU &lt;4&gt;</td>' in html
    (run_folder(RECORDS, planned.cells[0].signature) / "provenance.json").unlink()
    assert "not recorded (1 run)" in page(planned)


def test_claims_of_the_sweep_stand_with_their_verdicts():
    planned = plan_sweep(["sweeps=warmup", *WORDS])
    fill(planned)
    html = page(planned)
    text = {claim.id: claim.text for claim in read_claims() if claim.sweep == "warmup"}
    assert text
    for said in text.values():
        assert html.count(said) == 1
    assert "supported" in html
    narrowed = plan_sweep(["sweeps=warmup", *WORDS, "optim.warmup_steps=0"])
    fill(narrowed)
    assert "has no optim.warmup_steps=200" in page(narrowed)


def test_the_command_writes_the_page_without_the_trainer():
    fill(plan())
    code = "import sys; from andrea_exp.cli import main; print(main(sys.argv[1:])); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "tiny", *WORDS], capture_output=True, text=True, check=True
    )
    path, status, modules = done.stdout.splitlines()
    assert (path, status) == ("records/tables/tiny/report.html", "0")
    assert {"torch", "lightning", "andrea_exp.run"} & set(modules.split()) == set()
    Document(Path(path).read_text())


def test_without_a_name_all_sweeps_and_all_claims_are_there():
    planned = plan_sweep(["sweeps=warmup"])
    fill(planned, 3)
    assert andrea("report", "--out", "deep/page.html", cwd=Path()).stdout == "deep/page.html\n"
    html = Path("deep/page.html").read_text()
    text = "".join(Document(html).text)
    for claim in read_claims():
        assert text.count(f"{claim.text} ") == 1, claim.text
    assert "where does post-norm need warm-up?" in text
    assert "Is RMSNorm as good as LayerNorm?" not in text.partition("Claims without runs")[0]


@pytest.mark.parametrize("words", [["tiny"], [], ["tinny"]])
def test_no_runs_no_page(words: list[str]):
    plan()
    done = andrea("report", *words, cwd=Path(), check=2)
    assert len(done.stderr.splitlines()) == 1
    assert ("tiny" if words else "of any sweep") in done.stderr
    assert not list(Path().rglob("*.html"))


# Commands that give a run again


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_runs_words_give_its_signature(path: Path):
    planned = plan_sweep([f"sweeps={path.stem}"])
    cells = {cell.arm: cell for cell in [*planned.cells, *planned.guesses]}
    for cell in cells.values():
        (again,) = plan_sweep(words_of(cell.config)).cells
        assert again.signature == cell.signature, cell.label


@pytest.mark.parametrize(
    "words",
    [
        ["optim.clip=null", "optim.schedule=wsd", "optim.decay_fraction=0.3", "model.expansion_ratio=8/3"],
        ["model.depth_mode=equal_flops", "model.reference_layers=4", "model.n_layers=2"],
        ["model.d_head=24", "model.norm_placement=none", "model.final_norm=true", "model.activation=swiglu"],
        ["recipe=gemma2", "scale=demo"],
        ["data.path=\"some 'texts'\\/\"", "data.tokenizer=bpe"],
        ["data.mix={a:{path:\"some 'texts'\\\\\",weight:3},b:{corpus:sotu}}"],
    ],
    ids=lambda words: words[0],
)
def test_awkward_words_come_back(words: list[str]):
    folder = Path("some 'texts'\\")
    folder.mkdir()
    (folder / "one.txt").write_text("text " * 300)
    (cell,) = plan_sweep(words).cells
    (again,) = plan_sweep(words_of(cell.config)).cells
    assert again.signature == cell.signature
    assert again.config.data == cell.config.data
    assert words_of(make()) == words_of(make())


# In a browser

MEASURE = """<script>
addEventListener("load", () => {
  const wrong = [], say = (what, e) => wrong.push(what + ": " + e.outerHTML.slice(0, 120));
  const box = e => e.getBoundingClientRect();
  const shown = e => !e.closest("details:not([open]) > :not(summary)");
  const blocks = "h1,h2,h3,p,ul,pre,table,figure,figcaption,img,section,details,.wide";
  let seen = 0;
  for (const e of document.querySelectorAll(blocks)) {
    if (!shown(e)) continue;
    seen += 1;
    const b = box(e);
    if (b.width < 1 || b.height < 1) say("empty", e);
    if (!e.closest(".wide > *") && (b.right > innerWidth + .5 || b.left < -.5)) say("wide", e);
  }
  for (const e of document.querySelectorAll("main, section, figure, header, body, details[open]")) {
    const own = [...e.children].filter(c => c.matches(blocks + ",main,header,footer"));
    own.slice(1).forEach((c, i) => { if (box(c).top < box(own[i]).bottom - .5) say("overlaps", c); });
  }
  for (const row of document.querySelectorAll("tr")) {
    if (!shown(row)) continue;
    const cells = [...row.children];
    cells.slice(1).forEach((c, i) => { if (box(c).left < box(cells[i]).right - .5) say("overlaps", c); });
    for (const c of cells) if (c.scrollWidth > c.clientWidth + 1) say("runs over", c);
  }
  for (const e of document.images) if (!e.complete || !e.naturalWidth) say("no image", e);
  if (document.documentElement.scrollWidth > innerWidth) say("scrolls aside", document.body);
  const fetched = performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"));
  parent.postMessage(btoa(JSON.stringify({wrong, fetched, seen, width: innerWidth})), "*");
});
</script></body>"""
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def browse(path: Path, width: int, *what: str) -> subprocess.CompletedProcess[str]:
    """A page in a frame of a given width: a window of the browser's own is never narrower than 500 pixels."""
    assert BROWSER
    frame = f'<iframe src="{path.name}" style="width: {width}px; height: 1400px; border: 0"></iframe>'
    listener = "<script>addEventListener('message', e => document.title = e.data)</script>"
    Path("frame.html").write_text(f'<!DOCTYPE html><title></title><body style="margin: 0">{listener}{frame}')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={Path('profile').absolute()}", "--window-size=1280,1400"]
    command = [BROWSER, *flags, *what, Path("frame.html").absolute().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("opened", [False, True], ids=["folded", "unfolded"])
def test_in_a_browser_nothing_is_missing_or_in_the_way(width: int, opened: bool, whole: tuple[Plan, str]):
    html = whole[1].replace("<details>", "<details open>") if opened else whole[1]
    path = Path("page.html")
    path.write_text(html)
    seen = browse(path, width, f"--screenshot={Path('page.png').absolute()}")
    assert "CONSOLE" not in seen.stderr
    pixels = imread("page.png")[:, :width, :3]
    assert 0.01 < (pixels.mean(axis=2) < 0.6).mean() < 0.3  # ink
    path.write_text(POLICY.sub("", html).replace("</body>", MEASURE))
    dumped = browse(path, width, "--dump-dom")
    found = json.loads(base64.b64decode(re.search("<title>(.*?)</title>", dumped.stdout).group(1)))  # type: ignore[union-attr]
    assert found["wrong"] == []
    assert found["fetched"] == []
    assert found["width"] == width
    assert found["seen"] > 30
