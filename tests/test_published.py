"""Published tables beside ours: the arithmetic, and that they name arms that their sweep has."""

import io
import math

import pytest
from by_hand import plan, record_arms
from rich.console import Console

from andrea_exp.errors import UserError
from andrea_exp.results.formats import published_to_rich
from andrea_exp.results.published import Published, grid, of_sweep, read_published, rows
from andrea_exp.results.table import AblationTable
from andrea_exp.sweep.plan import plan_sweep
from andrea_exp.verbs.sweeps import _print_published

pytestmark = pytest.mark.usefixtures("empty_folder")

NATS = Published("N", "s", "nats", {"pre": 2.0, "post": 2.03, "other": 9.0}, {"pre": 0.003, "post": 0.004})
PERPLEXITY = Published("P", "s", "perplexity", {"pre": 10.0, "post": 12.0})


def table() -> AblationTable:
    return record_arms(plan(), {"pre": [2.0, 3.0, 4.0], "post": [2.1, 3.2, 4.3], "none": ["stuck", 2.0, 2.0]})


def test_differences_are_in_nats_to_our_baseline():
    found = {(r.arm, r.table): r for r in rows(table(), [NATS, PERPLEXITY])}
    assert set(found) == {("post", None), ("post", "N"), ("post", "P")}  # what one side lacks, or diverged, is left out
    assert found["post", None].difference == pytest.approx(0.2)
    assert found["post", "N"].difference == pytest.approx(0.03)
    assert (found["post", "N"].low, found["post", "N"].high) == pytest.approx((0.025, 0.035))  # SDs of 3 and 4
    assert found["post", "P"].difference == pytest.approx(math.log(1.2))
    assert found["post", "P"].low is None


def test_the_text_sets_them_side_by_side_and_says_that_scales_differ():
    head, body = grid(table(), [NATS, PERPLEXITY])
    assert head == ["arm", "ours, to pre", "N", "P"]
    assert body == [["post", "+0.200 [-0.048, +0.448]", "+0.030 ± 0.005", "+0.182"]]
    console = Console(width=100, file=io.StringIO())
    console.print(published_to_rich(table(), [NATS]))
    assert "their scale is not ours" in console.file.getvalue().replace("\n", " ")  # type: ignore[attr-defined]


@pytest.mark.parametrize("published", read_published(), ids=lambda p: f"{p.name} {p.sweep}")
def test_every_table_can_stand_beside_its_sweep(published: Published):
    assert set(published.sd) <= set(published.values)
    if published.sweep is None:
        return
    spec = plan_sweep([f"sweeps={published.sweep}"]).spec
    assert spec.baseline in published.values
    assert len(set(spec.compare) & set(published.values)) >= 2
    assert published.unit in ("nats", "perplexity")
    assert published in of_sweep(published.sweep)


def test_the_published_numbers_are_the_published_ones():
    """Against the differences as the papers' readers quote them."""
    shazeer = next(p for p in of_sweep("activation") if p.name == "Shazeer 2020")
    assert shazeer.values["gelu"] - shazeer.values["relu"] == pytest.approx(0.002)
    prores = next(p for p in of_sweep("norm_placement") if p.name == "ProRes 2026, 130M")
    assert (prores.values["pre"], prores.values["post"]) == (14.67, 14.84)


def test_the_command_names_the_sweeps_that_have_any():
    with pytest.raises(UserError, match=r"no published table asks this.*norm_placement"):
        _print_published(table())
