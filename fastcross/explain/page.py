"""An explanation as a page: one HTML file that needs nothing else, and the same figures and tables beside it."""

import base64
import csv
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastcross.explain.explanation import Driver, Explanation, Part, is_visible
from fastcross.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARS = 12  # of the example's figure, before the rest is drawn as one
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
img { max-width: 100%; height: auto; } table { border-collapse: collapse; }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left; } td.n, th.n { text-align: right; }
p.note { color: #555; }
"""


def write_page(
    folder: Path,
    explanation: Explanation,
    *,
    title: str,
    drivers: Mapping[tuple[str, str], Sequence[Driver]],
    importances: Mapping[str, float] | None = None,
    example: Sequence[Part] = (),
    values: Mapping[str, str] | None = None,
    top: int = 10,
) -> Path:
    """Write index.html, its figures (fields, degrees, pairs, example; .png) and tables (.csv); returns the page's path.

    Args:
        folder: made if it is not there.
        drivers: by pair of fields, the values that drive the cross.
        importances: of columns, for the whole model.
        example: the parts of one example's logit, and ``values``: that example's values by field.
    """
    folder.mkdir(parents=True, exist_ok=True)
    importances = importances or {}
    figures = {
        "fields": explanation.plot_fields(importances),
        "degrees": explanation.plot_degrees(),
        "pairs": explanation.plot_pairs(),
    }
    if example:
        figures["example"] = _waterfall(example, values or {}, explanation.of)
    images = {name: _save(figure, folder / f"{name}.png") for name, figure in figures.items()}
    strongest = explanation.strongest(len(explanation.names) ** 2)
    _write_csv(
        folder / "pairs.csv",
        ("field", "other_field", "strength", "share_of_variance"),
        [(*cross.fields, cross.strength, cross.share) for cross in strongest],
    )
    _write_csv(folder / "fields.csv", ("field", "strength"), explanation.by_themselves())
    if importances:
        ranked = sorted(importances.items(), key=lambda pair: -pair[1])
        _write_csv(folder / "importances.csv", ("column", "share_of_changes"), ranked)
    if example:
        rows = [(" × ".join(part.fields) or "constant", part.effect) for part in example]
        _write_csv(folder / "example.csv", ("part", "effect"), rows)
    sections = [
        f"<p>{explanation.rows:,} rows. The {explanation.of}'s standard deviation is {number(explanation.deviation)}. "
        f"The cross network's terms make {1 - explanation.unexplained:.1%} of its parts' variance; they are exact. The "
        f"deep network makes {explanation.unexplained:.1%}; how it uses the columns shows only when they are permuted."
        "</p>",
        "<h2>Each field by itself</h2>",
        '<p class="note">On the left, what a field does alone in the cross network, on average over all others. On '
        "the right, how far the whole model's output moves when a column is permuted among the rows: its crosses and "
        "the deep network are part of this.</p>",
        images["fields"],
        "<h2>By degree</h2>",
        images["degrees"],
        "<h2>Pairs of fields</h2>",
        '<p class="note">What two fields do together, beyond what each of them does on average over the training data.'
        "</p>",
        images["pairs"],
        "<h2>The strongest crosses, and the values that drive them</h2>",
        _cross_table(explanation, drivers, top),
    ]
    if example:
        sections += ["<h2>One example</h2>", images["example"]]
    page = folder / "index.html"
    with atomic(page) as temporary:
        temporary.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n" + "\n".join(sections) + "\n"
            "</body></html>\n",
            encoding="utf-8",
        )
    return page


def driver_text(fields: tuple[str, str], driver: Driver) -> str:
    """As in "C14 = 3f2a × hour = 18: +0.314, 0.4 % of rows"."""
    both = " × ".join(f"{field} = {value}" for field, value in zip(fields, driver.values, strict=True))
    return f"{both}: {number(driver.effect, '+')}, {100 * driver.share:.2g} % of rows"


def number(value: float, sign: str = "") -> str:
    """Three digits, or all of those before the decimal point."""
    return f"{value:{sign},.0f}" if 1000 <= abs(value) < 1e9 else f"{value:{sign}.3g}"


def _cross_table(explanation: Explanation, drivers: Mapping[tuple[str, str], Sequence[Driver]], top: int) -> str:
    rows = []
    for cross in explanation.strongest(top):
        if not is_visible(cross.share):
            continue
        texts = [html.escape(driver_text(cross.fields, driver)) for driver in drivers.get(cross.fields, ())]
        rows.append(
            f"<tr><td>{html.escape(' × '.join(cross.fields))}</td><td class=n>{number(cross.strength)}</td>"
            f"<td class=n>{cross.share:.1%}</td><td>{'<br>'.join(texts)}</td></tr>"
        )
    if not rows:
        return f"<p>None has as much as 0.1 % of the {explanation.of}'s variance.</p>"
    head = "<tr><th>cross</th><th class=n>strength</th><th class=n>share of variance</th><th>values</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _save(figure: "Figure", path: Path) -> str:
    """Writes the figure, and returns it as an element of the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    with atomic(path) as temporary:
        temporary.write_bytes(buffer.getvalue())
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{encoded}">'


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _waterfall(parts: Sequence[Part], values: Mapping[str, str], of: str) -> "Figure":
    """One example's logit or prediction, part by part; ``values`` are the fields', as a person would write them."""
    from matplotlib.figure import Figure  # which is slow to import; without pyplot, which looks for a display

    (_, constant), *rest = parts
    ranked = sorted(rest, key=lambda part: -abs(part[1]))
    shown, others = ranked[:BARS], sum(effect for _, effect in ranked[BARS:])
    steps = [
        (f"constant {number(constant, '+')}", 0.0),
        *((_label(fields, values), effect) for fields, effect in shown),
    ]
    steps.append((f"{len(ranked) - len(shown)} smaller parts", others))
    figure = Figure(figsize=(9, 0.4 * len(steps) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.axvline(constant, color="tab:gray", linewidth=0.8)
    at = constant
    for row, (_, effect) in list(enumerate(steps))[1:]:
        axes.barh(row, effect, left=at, color="tab:red" if effect > 0 else "tab:blue")
        axes.text(max(at, at + effect), row, f" {number(effect, '+')}", va="center", fontsize=8)
        at += effect
    axes.axvline(at, color="black", linestyle=":", label=f"{of} {number(at, '+')}")
    axes.set_yticks(range(len(steps)), [label for label, _ in steps], fontsize=8)
    axes.invert_yaxis()
    axes.use_sticky_edges = False
    axes.margins(x=0.12)
    axes.locator_params(axis="x", nbins=6)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set(xlabel=of, title=f"One example's {of}")
    return figure


def _label(fields: tuple[str, ...], values: Mapping[str, str]) -> str:
    if fields == ("…",):
        return "crosses of four fields and more"
    if fields == ("deep",):
        return "deep network (unexplained)"
    return " × ".join(f"{field} = {values[field]}" if field in values else field for field in fields)
