"""A page for readers: what was asked, what the runs gave, and how to have each number again. Made from records alone.

The page is one file that asks for nothing else; page.html says what stands where and how it looks. The same records
give the same page.
"""

import base64
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from andrea_exp import ROOT
from andrea_exp.compose import words_of
from andrea_exp.errors import UserError
from andrea_exp.record import Status, read_json, run_folder
from andrea_exp.results import claims, claims_view, figures, published
from andrea_exp.results.contrast import by_place, place
from andrea_exp.results.formats import html_table
from andrea_exp.results.layout import COLUMNS, flat_legend, footnotes, legend, loss_text, wide_grid
from andrea_exp.results.load import Run, plan_of, read_runs
from andrea_exp.results.table import AblationTable, TableCell, table_of
from andrea_exp.results.verdicts import Verdict
from andrea_exp.sweep.plan import Plan, column_title, questions

LARGEST_SVG = 500_000  # bytes; what has more points is shown as pixels
CSS_PIXELS = 96  # an inch
# What no page may hold, and what would turn the text around it: control characters, marks of direction.
BANNED = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))
# What a page tells of its runs' provenance.
TOLD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "numerics version": lambda p: p["numerics_version"],
    "text (fingerprint)": lambda p: p["data_fingerprint"],
    "device": lambda p: " ".join(filter(None, (p["device"]["type"], p["device"]["name"]))),
    "threads": lambda p: p["threads"],
    "ops": lambda p: ", ".join(sorted(set(p["ops"].values()))),
    "platform": lambda p: p["platform"],
    "commit": lambda p: p["git"]["commit"][:12] + (" with changes" if p["git"]["dirty"] else ""),
    "begun": lambda p: time.strftime("%Y-%m-%d", time.gmtime(p["attempts"][0]["time"])),
    "attempts": lambda p: len(p["attempts"]),
}


@dataclass(frozen=True)
class Picture:
    """A figure as a page holds it."""

    source: str  # a data: address
    caption: str
    width: int  # CSS pixels


@dataclass(frozen=True)
class Line:
    """A run in the list of those behind a cell."""

    run: Run
    command: str


@dataclass(frozen=True)
class Place:
    """A cell of the table, and the runs that its numbers come from."""

    anchor: str
    title: str
    cell: TableCell
    lines: list[Line]

    @property
    def loss(self) -> str:
        return loss_text(self.cell)


@dataclass(frozen=True)
class Chapter:
    """One sweep, ready for the template."""

    anchor: str
    plan: Plan
    table: AblationTable
    header: str
    command: str
    state: Counter[str]
    head: list[str]
    rows: list[tuple[list[str], list[tuple[Place, str]]]]  # an arm's first entries, then one a column
    places: list[Place]
    pictures: list[Picture]
    beside: tuple[list[str], list[list[str]], list[str]] | None  # published differences: headings, rows, notes
    judged: list[claims.Judged]
    provenance: dict[str, Counter[str]]

    @property
    def title(self) -> str:
        return self.table.question or self.plan.name

    @property
    def finished(self) -> int:
        return sum(n for status, n in self.state.items() if Status(status).finished)

    @property
    def every_column(self) -> str:
        return html_table(self.table, tuple(COLUMNS))

    @property
    def legend(self) -> str:
        return legend(self.table)

    @property
    def columns_legend(self) -> str:
        return flat_legend(self.table, tuple(COLUMNS))

    @property
    def notes(self) -> list[str]:
        return footnotes(self.table)


def chapter(anchor: str, plan: Plan, records: Path, words: Sequence[str], drawn: Mapping[str, Figure]) -> Chapter:
    """All that a page tells of one sweep, from whatever runs there are; `drawn` are its figures by name."""
    runs = read_runs(plan, records)
    table = table_of(plan, runs)
    head, texts = wide_grid(table)
    all_places = list(_places(anchor, table, runs))
    places = {(p.cell.arm, repr(p.cell.column)): p for p in all_places}
    before = len(head) - len(table.columns)
    rows = [
        (text[:before], [(places[arm, repr(c)], t) for c, t in zip(table.columns, text[before:], strict=True)])
        for arm, text in zip(table.arms, texts, strict=True)
    ]
    others = published.of_sweep(plan.name)
    asked = [claim for claim in claims.read_claims() if claim.sweep == plan.name]
    return Chapter(
        anchor=anchor,
        plan=plan,
        table=table,
        header=header(plan.name),
        command=shlex.join(["andrea-exp", "sweep", *words]),
        state=Counter(str(s) for s in {run.cell.signature: run.status for run in runs}.values()),
        head=head,
        rows=rows,
        places=all_places,
        pictures=list(_pictures(drawn)),
        beside=(*published.grid(table, others), published.notes(others)) if others else None,
        judged=[claims.judge_or_tell(claim, plan, records, runs) for claim in asked],
        provenance=provenance(runs, records),
    )


def _places(anchor: str, table: AblationTable, runs: Sequence[Run]) -> Iterator[Place]:
    of_cell = by_place(runs, tuned=False)
    for i, cell in enumerate(table.cells):
        own = sorted(of_cell.get(place(cell.arm, cell.column, {}), []), key=lambda run: run.cell.purpose)
        title = ", ".join(filter(None, (cell.arm, column_title(cell.column))))
        lines = [Line(run, shlex.join(["andrea-exp", "train", *words_of(run.cell.config)])) for run in own]
        yield Place(f"{anchor}-{i}", title, cell, lines)


def header(name: str) -> str:
    """The comment at the top of a sweep's file; none where no file describes it."""
    files = (folder / "sweeps" / f"{name}.yaml" for folder in (Path.cwd(), ROOT))
    path = next((file for file in files if file.is_file()), None)
    lines = path.read_text().splitlines() if path else []
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line[1:].removeprefix(" ") for line in lines[:end] if not line.startswith("# @package"))


def _pictures(drawn: Mapping[str, Figure]) -> Iterator[Picture]:
    for name, figure in drawn.items():
        kind, content = "svg+xml", figures.encoded(figure, "svg").decode().translate(BANNED).encode()
        if len(content) > LARGEST_SVG:
            kind, content = "png", figures.encoded(figure, "png")
        source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        yield Picture(source, figures.CAPTIONS[name], round(CSS_PIXELS * figure.get_figwidth()))


def provenance(runs: Iterable[Run], records: Path) -> dict[str, Counter[str]]:
    """What finished runs ran on and with: a name, and each value with the number of its runs."""
    finished = {run.cell.signature for run in runs if run.status.finished}
    found: dict[str, Counter[str]] = {}
    for sig in sorted(finished):
        told = read_json(run_folder(records, sig) / "provenance.json") or {}
        for name, value in _told(told):
            found.setdefault(name, Counter())[value] += 1
    return found


def _told(provenance: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, read in TOLD.items():
        try:
            yield name, str(read(provenance))
        except (KeyError, TypeError):  # an older version did not write it, or a wheel has no commit
            yield name, "not recorded"
    yield from provenance.get("versions", {}).items()


def page_of(plan: Plan, records: Path, words: Sequence[str], drawn: Mapping[str, Figure]) -> str:
    """The page of one sweep; `words` are those that it runs with, `drawn` its figures by name."""
    made = chapter("s0", plan, records, words, drawn)
    return _render([made], made.title)


def write_page(name: str, overrides: Sequence[str], out: Path | None) -> Path:
    """Writes a sweep's page, to report.html beside its tables. Raises UserError where no run has finished."""
    plan, records = plan_of(name, overrides)
    if not _begun(plan, records):
        raise UserError(
            f"{plan.name}: no finished runs with these overrides in {records}/; run: andrea-exp sweep {name}"
        )
    page = page_of(plan, records, [name, *overrides], figures.figures_of(plan, records))
    return _write(page, out or records / "tables" / plan.name / "report.html")


def write_page_of_all(overrides: Sequence[str], out: Path | None) -> Path:
    """Writes the page of all sweeps that have a finished run. Raises UserError where there is none."""
    plans = {name: plan_of(name, overrides) for name in questions()}
    begun = {name: found for name, found in plans.items() if _begun(*found)}
    records = next(iter(plans.values()))[1]
    if not begun:
        raise UserError(f"no finished runs of any sweep in {records}/; run: andrea-exp sweep demo")
    made = [
        chapter(f"s{i}", *found, [name, *overrides], figures.figures_of(*found))
        for i, (name, found) in enumerate(begun.items())
    ]
    untold = [c for c in claims.read_claims() if c.sweep not in begun]
    rest = [claims.Judged(c, Verdict.missing, [], [f"asked by {c.sweep}"] if c.sweep else [], []) for c in untold]
    return _write(_render(made, "What the runs say", rest), out or records / "report.html")


def _begun(plan: Plan, records: Path) -> bool:
    return any(run.status.finished for run in read_runs(plan, records))


def _write(page: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _render(chapters: Sequence[Chapter], title: str, untold: Sequence[claims.Judged] | None = None) -> str:
    """The page as HTML: of one sweep, or of all with the claims that none of them tells of."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"effect": claims_view.effect_text, "column": column_title}
    page = environment.get_template("page.html").render(chapters=chapters, title=title, untold=untold)
    return page.translate(BANNED)
