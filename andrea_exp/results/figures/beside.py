"""Our differences beside published ones."""

from matplotlib.figure import Figure

from andrea_exp.results.figures.panels import finish, look, panels, plain, proxy, seeds
from andrea_exp.results.figures.seen import Seen
from andrea_exp.results.published import of_sweep, rows


def published_differences(seen: Seen) -> Figure | None:
    """Each arm's difference to the baseline, ours and in every published table that asks the same: on other scales."""
    table = seen.table
    found = rows(table, of_sweep(table.name))
    theirs = {row.arm for row in found if row.table is not None}
    arms = [arm for arm in table.arms if arm in theirs]
    if not any(row.table is None and row.arm in theirs for row in found):
        return None
    names: list[str | None] = list(dict.fromkeys(row.table for row in found))
    x = f"difference to {plain(table.baseline)} (nats a token)\npublished: another size, text and objective"
    figure, panel_of = panels([""], x, "")
    axes = panel_of[""]
    for i, name in enumerate(names):
        own = [row for row in found if row.table == name and row.arm in theirs]
        y = [arms.index(row.arm) + 0.12 * (i - (len(names) - 1) / 2) for row in own]
        axes.plot([row.difference for row in own], y, ls="", **look(i))
        for row, height in zip(own, y, strict=True):
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [height, height], "-", color=look(i)["color"])
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(arms)), [plain(arm) for arm in arms])
    axes.invert_yaxis()
    ours = f"ours [95% CI], n = {seeds(seen.plan)} seeds"
    finish(figure, [proxy(name or ours, ls="", **look(i)) for i, name in enumerate(names)], "")
    return figure
