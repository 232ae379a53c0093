"""Judged claims, and facts beside them, as rows: for a terminal, for machines, for a page."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from andrea_exp.facts import check_all
from andrea_exp.results.claims import OF_DIVERGENCE, Judged
from andrea_exp.results.formats import markdown_grid
from andrea_exp.results.verdicts import Finding, Verdict


def row(judged: Judged) -> dict[str, Any]:
    """A claim flat: its fields, verdict, effect, interval, n, regimes, remarks, and the runs that it rests on."""
    claim, main = judged.claim, judged.main
    return {
        **asdict(claim),
        "bounds": [bound if math.isfinite(bound) else None for bound in claim.bounds],  # JSON has no infinity
        "verdict": str(judged.verdict),
        "effect": main.effect,
        "ci_low": main.low,
        "ci_high": main.high,
        "n": min((r.finding.n for r in judged.regimes), default=0),  # seeds; the same ones in each regime
        "regimes": [{"where": r.where, **asdict(r.finding)} for r in judged.regimes],
        "remarks": judged.remarks,
        "runs": judged.signatures,
    }


def rows(judged: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """One row a claim, then one a fact that is counted and needs no runs."""
    yield from map(row, judged)
    for fact in check_all():
        verdict = Verdict.supported if fact["holds"] else Verdict.contradicted
        yield {
            "id": fact["row"],
            "text": fact["text"],
            "source": {"A": "first text", "B": "second text"}[fact["row"][0]],
            "sweep": None,
            "rule": "exact",
            "verdict": str(verdict),
            "effect": fact["exact"] - fact["stated"],
            "stated": fact["stated"],
            "exact": fact["exact"],
            "unit": fact["unit"],
            "remarks": [fact["remark"]] if fact["remark"] else [],
            "runs": [],
        }


def render(found: Sequence[dict[str, Any]]) -> Table:
    """The rows for a terminal; a claim of several regimes has no one number, but how many of them say what."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, more in (("", {"no_wrap": True}), ("claim", {"ratio": 3}), ("verdict", {}), ("effect", {"ratio": 2})):
        table.add_column(title, **more)
    table.add_column("n", justify="right")
    for row in found:
        claim = Text(row["text"]).append("".join(f"\n{line}" for line in _below(row)), style="dim")
        n = str(row["n"]) if row.get("n") else ""
        table.add_row(Text(row["id"]), claim, Text(row["verdict"]), Text(_effect(row)), n)
    return table


def to_markdown(found: Sequence[dict[str, Any]]) -> str:
    """The rows as one table, for a file."""
    lines = [["\n".join([r["text"], *_below(r)]), r["verdict"], _effect(r), str(r.get("n") or "")] for r in found]
    return "\n".join([*markdown_grid(["claim", "verdict", "effect [95% CI]", "n"], lines), ""])


def _below(row: dict[str, Any]) -> list[str]:
    """What stands below a claim: its sweep, how its regimes went where it has several, its remarks."""
    told = Counter(regime["verdict"] for regime in row.get("regimes", []))
    went = ", ".join(f"{n} {verdict}" for verdict, n in told.most_common()) if told.total() > 1 else ""
    head = ": ".join(text for text in (row["sweep"], went) if text)
    return [line for line in (head, *row["remarks"]) if line]


def _effect(row: dict[str, Any]) -> str:
    if row["rule"] == "exact":
        return f"{row['exact']:.6g} {row['unit']}".strip()
    return effect_text(Finding(Verdict(row["verdict"]), row["effect"], row["ci_low"], row["ci_high"]), row["rule"])


def effect_text(finding: Finding, rule: str) -> str:
    """An effect with its interval, as far as there are any."""
    if finding.effect is None:
        return ""
    if rule in OF_DIVERGENCE:
        return f"{finding.effect:.0%} diverged"
    interval = "" if finding.low is None else f" [{finding.low:+.3g}, {finding.high:+.3g}]"
    return f"{finding.effect:+.3g}{interval}"
