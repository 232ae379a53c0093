"""A trace for a terminal, for machines, and as one figure."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from andrea_exp.record import finite
from andrea_exp.style import COLOURS, STYLE
from andrea_exp.trace import Crossing, Trace, Traced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Spelled = Callable[[int], str]
PLACES = {"branch": "on what it gives", "sum": "on the sum", "read": "on the next reading"}
WIDTH = 100  # where there is no terminal
BAR = 12  # characters
HEADS = 5  # side by side, so that a table stays within 100 columns
LONGEST = 14  # characters of a token in a table
SHOWN_TOKENS = 40  # around the traced one


def to_json(traced: Traced) -> str:
    """The trace with each token's text beside its number; what is no number is null."""
    found, spelled = traced.found, traced.spelled
    plain = asdict(found)
    plain["tokens"] = [{"token": token, "text": spelled(token)} for token in found.tokens]
    for reading in plain["readings"]:
        for guess in reading["guesses"]:
            guess["text"] = spelled(guess["token"])
    return json.dumps(finite({"model": traced.title, "notes": traced.notes, **plain}), indent=2)


def show(traced: Traced) -> None:
    """Prints it."""
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(render(traced))


def render(traced: Traced) -> RenderableType:
    """Tables of at most 100 columns."""
    found, spelled = traced.found, traced.spelled
    return Group(
        *(Text(line) for line in (traced.title, *traced.notes)),
        _text(found, spelled),
        Text(),
        _sizes(found),
        *_norms(found),
        _lens(found, spelled),
        *_attention(found, spelled),
        _hidden(found, spelled),
    )


def _token(text: str) -> str:
    """A token within a table: its spaces seen, its length bounded."""
    seen = text.replace(" ", "␣")
    return seen if len(seen) <= LONGEST else f"{seen[: LONGEST - 1]}…"


def _text(found: Trace, spelled: Spelled) -> Text:
    """The tokens around the traced one, which stands out."""
    first = max(0, found.position - SHOWN_TOKENS // 2)
    text = Text("… " if first else "")
    for place, token in enumerate(found.tokens[first : first + SHOWN_TOKENS], first):
        text.append(spelled(token), "bold reverse" if place == found.position else "")
    return text.append(" …" if first + SHOWN_TOKENS < len(found.tokens) else "")


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Columns `left` hold words, `right` numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _sizes(found: Trace) -> Table:
    title = f"token {found.position}: what each branch adds to the stream (root mean squares)"
    table = _table(title, ("block", "branch"), ("stream", "adds", "ratio", "cosine", "ratio of text"))
    table.add_column("stream", no_wrap=True)
    largest = max((c.stream for c in found.crossings if math.isfinite(c.stream)), default=0.0)
    for c in found.crossings:
        sizes = (f"{v:.3g}" for v in (c.stream, c.correction, c.ratio))
        numbers = (*sizes, f"{c.cosine:+.2f}", f"{c.ratio_of_text:.3g}")
        table.add_row(c.block, c.branch, *numbers, bar(c.stream, largest))
    return table


def _norms(found: Trace) -> Iterator[Table]:
    """What the norms did; nothing where the model has none."""
    rows = [("embedding", "", [found.opening] if found.opening else [])]
    rows += [(c.block, c.branch, c.norms) for c in found.crossings]
    places = [place for place in PLACES if any(n.place == place for *_, norms in rows for n in norms)]
    if not places:
        return
    titles = [f"{PLACES[place]}: before, after" for place in places]
    table = _table("\nnorms (root mean squares)", ("block", "branch"), titles)
    for block, branch, norms in rows:
        by_place = {n.place: f"{n.before:.3g}  {n.after:.3g}" for n in norms}
        table.add_row(block, branch, *(by_place.get(place, "") for place in places))
    yield table


def bar(value: float, largest: float) -> str:
    """A bar of eighths of a character; empty for what is no number."""
    if not (math.isfinite(value) and largest > 0):
        return ""
    whole, eighths = divmod(round(8 * BAR * value / largest), 8)
    return "█" * whole + ("▏▎▍▌▋▊▉"[eighths - 1] if eighths else "")


def _lens(found: Trace, spelled: Spelled) -> Table:
    follows = spelled(found.tokens[found.position + 1]) if found.position + 1 < len(found.tokens) else None
    table = _table("\nread out at each depth", ("after",), ())
    for rank in range(len(found.readings[0].guesses)):
        table.add_column(f"guess {rank + 1}", no_wrap=True)
    if follows is not None:
        table.add_column(f"next: {_token(follows)}", justify="right", no_wrap=True)
        table.add_column("nats", justify="right", no_wrap=True)
    for reading in found.readings:
        guesses = [f"{g.probability:.2f} {_token(spelled(g.token))}" for g in reading.guesses]
        known = [] if follows is None else [f"{reading.next_probability:.3f}", f"{reading.next_loss:.2f}"]
        table.add_row(reading.depth, *guesses, *known)
    return table


def _attention(found: Trace, spelled: Spelled) -> Iterator[Table]:
    """Heads side by side, a few in a table."""
    heads = len(found.looking[0].heads)
    for first in range(0, heads, HEADS):
        some = range(first, min(first + HEADS, heads))
        title = "\nattended most: weight, position, token; entropy of each head (1: even)"
        table = _table(title, ("block", *(f"head {h}" for h in some), "entropy"))
        for row in found.looking:
            own = row.heads[first : first + HEADS]
            cells = [f"{h.weight:.2f} {h.position} {_token(spelled(found.tokens[h.position]))[:6]}" for h in own]
            table.add_row(row.block, *cells, " ".join(f"{h.entropy:.1f}" for h in own))
        yield table


def _hidden(found: Trace, spelled: Spelled) -> Table:
    title = "\nhidden units over the text"
    table = _table(title, ("block",), ("units", "dead on all tokens", "loudest", "unit", "at token"))
    for row in found.hidden:
        at = f"{row.position} {_token(spelled(found.tokens[row.position]))}"
        table.add_row(row.block, str(row.units), str(row.dead), f"{row.loudest:+.3g}", str(row.unit), at)
    return table


def figure(traced: Traced) -> "Figure":
    """Sizes of stream and corrections by depth, and the likeliest tokens at each depth, coloured by probability."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = traced.found

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(9.5, 1.6 + 0.28 * len(found.readings)), layout="constrained")
        sizes, heat = drawn.subplots(1, 2, sharey=True)
        _draw_sizes(sizes, found)
        _draw_lens(drawn, heat, found, traced.spelled)
        drawn.suptitle(f"{traced.title}, token {found.position}", fontsize=10, parse_math=False)
    return drawn


def _draw_sizes(axes: "Axes", found: Trace) -> None:
    """Depth runs downwards: row 0 is the embedding, a block's corrections stand in its row."""
    depths = [r.depth for r in found.readings]
    axes.plot([r.stream for r in found.readings], range(len(depths)), "-o", color=COLOURS[0], ms=3, label="stream")
    of_branch: dict[str, list[Crossing]] = {}
    for c in found.crossings:
        of_branch.setdefault(c.branch, []).append(c)
    for (branch, crossings), colour, marker in zip(of_branch.items(), COLOURS[1:], "s^", strict=False):
        rows = [depths.index(c.block) for c in crossings]
        axes.plot([c.correction for c in crossings], rows, marker, color=colour, ms=4, label=f"{branch} adds")
    if any(v > 0 for v in [r.stream for r in found.readings] + [c.correction for c in found.crossings]):
        axes.set_xscale("log", nonpositive="mask")
    axes.set_yticks(range(len(depths)), depths)
    axes.set_xlabel("root mean square of the traced token")
    axes.legend(frameon=False, fontsize=8)


def _draw_lens(figure: "Figure", axes: "Axes", found: Trace, spelled: Spelled) -> None:
    shares = [[g.probability for g in r.guesses] for r in found.readings]
    image = axes.imshow(shares, aspect="auto", cmap="cividis", vmin=0, vmax=1)
    for row, reading in enumerate(found.readings):
        for column, guess in enumerate(reading.guesses):
            ink = "black" if guess.probability > 0.5 else "white"
            text = f"{_token(spelled(guess.token))}  {guess.probability:.2f}"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8, parse_math=False)
    axes.set_xticks(range(len(shares[0])), [f"guess {i + 1}" for i in range(len(shares[0]))])
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="probability")
