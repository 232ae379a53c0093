"""What an ops.json says: the table, the two comparisons that the source texts ask for, the figure. Needs no GPU.

Share: bytes that must move, a second, over those of a plain copy of a tensor of the same size in the same run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from andrea_exp.bench_ops.cases import IMPLEMENTATIONS, INEXACT, MOVED, UNFUSED
from andrea_exp.style import COLOURS, STYLE

Row = dict[str, Any]
KEY = ("op", "dtype", "M", "N")
DIRECTIONS = ("forward", "backward")


def show(found: Row) -> None:
    """Prints it, with rich where it is installed."""
    header, body = table(found)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for cells in [header, *body]:
            print("\t".join(cells))
    else:
        drawn = Table(*header, box=None)
        for cells in body:
            drawn.add_row(*cells)
        Console().print(drawn)
    for line in remarks(found):
        print(line)


def table(found: Row) -> tuple[list[str], list[list[str]]]:
    """A line an op, shape and direction; of each implementation the share and the median, or why there is none."""
    impls = [i for i in IMPLEMENTATIONS if any(r["impl"] == i for r in [*found["rows"], *found["checks"]])]
    timed = {(*(r[k] for k in KEY), r["direction"], r["impl"]): r for r in found["rows"]}
    wrong = {(*(c[k] for k in KEY[:2]), c["impl"]) for c in found["checks"] if not c["right"]}
    body = []
    for *key, direction in dict.fromkeys(where[:-1] for where in timed):
        cells = [_cell(timed.get((*key, direction, i)), (*key[:2], i) in wrong) for i in impls]
        body.append([key[0], key[1], f"{key[2]} x {key[3]}", direction, *cells])
    return ["op", "dtype", "M x N", "direction", *impls], body


def _cell(row: Row | None, wrong: bool) -> str:
    if row is None:
        return "wrong" if wrong else ""
    waited = "" if row["ahead"] in (True, None) else " (launches)"  # the time holds waits for the CPU
    return f"{row['share']:.0%} {row['median_us']:.4g}{waited}"


def remarks(found: Row) -> Iterator[str]:
    """What a reader of the table must know."""
    yield "Cells: share of a copy's bandwidth, median microseconds."
    about = found["about"]
    if note := about.get("note"):
        yield f"Note: {note}."
    if about["interpreted"]:
        yield "Note: our Triton kernels ran in Triton's interpreter."
    for copied in found["copies"]:
        after = f", {copied['after_gb_s']:.0f} at the end" if "after_gb_s" in copied else ""
        yield "copy of {M} x {N} {dtype}: {before_gb_s:.0f} GB/s".format(**copied) + after
    for impl, why in found["absent"].items():
        yield f"{impl} was not measured: {why}"
    yield from filter(None, map(what_is_wrong, found["checks"]))
    if found["skipped"]:
        first = "{op} {dtype} {M} x {N}: {why}".format(**found["skipped"][0])
        yield f"skipped: {len(found['skipped'])}, listed in ops.json; the first: {first}"
    yield from map(_told, comparisons(found))


APART = {"reference": "eager addition and norm", "unfused": "an addition and our norm"}


def what_is_wrong(check: Row) -> str | None:
    """One line, or None: also where an implementation that is known to be inexact is no more than that."""
    if check["right"] or (check["impl"] == INEXACT and not check["failed"]):
        return None
    off = "{tensor} is off by {beyond:.3g} beyond 2 ulp, allowed {allowed:.3g}"
    return "WRONG: {op} {dtype} {M} x {N} by {impl}: ".format(**check) + (check["failed"] or off.format(**check))


def comparisons(found: Row) -> list[Row]:
    """Two statements of the source texts, measured: what fusing add + norm saves, what tanh.approx.f32 saves.

    `times` is the time of what is done apart (of tanh.approx) over that of the fused op (of the exact form).
    """
    by = {(*(r[k] for k in KEY), r["direction"], r["impl"]): r["median_us"] for r in found["rows"]}
    made: list[Row] = []
    for (*where, impl), us in by.items():
        place = dict(zip((*KEY, "direction"), where, strict=True))
        fused, exact = by.get((*where, "triton")), by.get((*where, "cuda"))
        if place["op"].startswith("add_norm") and impl in APART and fused:
            at = DIRECTIONS.index(place["direction"])
            ratios = {"times": us / fused, "bytes": UNFUSED[at] / MOVED["add_norm"][at]}
            made.append({"what": "fusion", **place, "apart": impl, **ratios})
        if impl == INEXACT and exact:
            made.append({"what": "tanh.approx", **place, "times": us / exact, "errors": _largest_errors(found, place)})
    return made


def _told(c: Row) -> str:
    where = "{op} {dtype} {M} x {N} {direction}".format(**c)
    if c["what"] == "fusion":
        return f"{where}: {APART[c['apart']]} take {c['times']:.3f} times as long as fused; bytes say {c['bytes']:.3f}"
    return f"{where}: tanh.approx takes {c['times']:.3f} of the exact form's time; largest errors {c['errors']}"


def _largest_errors(found: Row, place: Row) -> dict[str, float]:
    """Against float64, of value or gradient, by form."""
    return {
        c["impl"]: c["largest"]
        for c in found["checks"]
        if all(c[k] == place[k] for k in KEY) and c["impl"] in ("cuda", INEXACT)
    }


def figure_if_possible(found: Row, path: Path) -> Path | None:
    try:
        return figure(found, path) if found["rows"] else None
    except ImportError:
        return None


def figure(found: Row, path: Path) -> Path:
    """Bars: the share of a copy's bandwidth by op and implementation, both directions, of the first shape timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first = found["rows"][0]
    rows = [r for r in found["rows"] if all(r[k] == first[k] for k in KEY[1:])]
    names = list(dict.fromkeys(r["op"] for r in rows))
    impls = [i for i in IMPLEMENTATIONS if any(r["impl"] == i for r in rows)]
    colour = dict(zip(IMPLEMENTATIONS, COLOURS, strict=False))
    with plt.rc_context(STYLE):
        drawn, panels = plt.subplots(2, 1, figsize=(2 + 0.6 * len(names), 5.5), sharex=True, layout="constrained")
        for panel, direction in zip(panels, DIRECTIONS, strict=True):
            for place, impl in enumerate(impls):
                shares = {r["op"]: r["share"] for r in rows if (r["impl"], r["direction"]) == (impl, direction)}
                at = [names.index(n) + (place - (len(impls) - 1) / 2) * 0.8 / len(impls) for n in shares]
                panel.bar(at, list(shares.values()), 0.8 / len(impls), label=impl, color=colour[impl])
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_ylabel(f"{direction}:\nshare of a copy's bandwidth")
        panels[1].set_xticks(range(len(names)), names, rotation=40, ha="right")
        panels[0].legend(ncols=len(impls), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        drawn.suptitle(_title(found, first))
        drawn.savefig(path)
        plt.close(drawn)
    return path


def _title(found: Row, first: Row) -> str:
    about = found["about"]
    speed = found["copies"][0]["before_gb_s"]  # of this shape, since it was timed first
    where = (
        f"{about.get('name', about['platform'])}, {first['dtype']} {first['M']} x {first['N']}, copy {speed:.0f} GB/s"
    )
    return f"{where}\n{about['note']}" if "note" in about else where
