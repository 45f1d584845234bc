"""The page of a report: one self-contained HTML file, plots as inline SVG.

A plot shows what a table hides: how acceptance falls from position to position, what each method and k is worth, how
speed changes with the requests in flight, how the head learned.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.report import COLUMNS, LEGEND, failures_of, setup_lines, tables_of

Run = Mapping[str, Any]
GREY, HEAD, NGRAM, SUFFIX = "#8a8f98", "#2563c9", "#e08a1e", "#3a9d5d"  # baseline, the head, n-gram, suffix
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #fff; max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
p.sub { color: #5b6472; margin: .2rem 0 1.2rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { border: 1px solid #d9dee6; border-radius: 8px; padding: .6rem 1rem; min-width: 9rem; }
.card b { display: block; font-size: 1.45rem; } .card span { color: #5b6472; font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e6eaf0; white-space: nowrap; }
th { color: #5b6472; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.box { border-left: 4px solid #c98a12; background: #fdf6e7; padding: .5rem 1rem; margin: 1rem 0; }
.box.note { border-color: #9aa5b5; background: #f5f7fa; }
.box.bad { border-color: #c23b3b; background: #fbeceb; }
.box li { margin: .2rem 0; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 0 1.5rem; } .plots .wide { grid-column: 1 / -1; }
details { margin: .6rem 0; } summary { cursor: pointer; } pre { font-size: .8rem; overflow-x: auto; background: #f5f7fa; padding: .8rem; }
dt { font-family: ui-monospace, monospace; font-size: .85rem; } dd { margin: 0 0 .4rem 1.2rem; color: #3d4654; }
"""


def to_html(report: Mapping[str, Any]) -> str:
    """The page as one string; it loads nothing from elsewhere."""
    body = [f"<h1>{_e(report['name'])}</h1>", f'<p class="sub">{_e(setup_lines(report)[0])}</p>', _cards(report)]
    for title, items, kind in (
        ("Failed", failures_of(report), "box bad"),
        ("Findings", report["findings"], "box"),
        ("Notes", report["notes"], "box note"),
    ):
        if items:
            body.append(f'<div class="{kind}"><b>{title}</b><ul>' + "".join(f"<li>{_nested(item)}</li>" for item in items) + "</ul></div>")
    tables = [f"<h3>{_e(heading)}</h3>" + _table(COLUMNS, rows) for heading, rows in tables_of(report).items()]
    results = ["<h2>Results</h2>", *tables, f'<p class="sub">{_e(LEGEND)}</p>']
    body += [*results, *figures(report)] if len(tables) <= 2 else [*figures(report), *results]
    body.append("<h2>Set-up</h2><ul>" + "".join(f"<li>{_e(line)}</li>" for line in setup_lines(report)) + "</ul>")
    body.append(f"<details><summary>Recipe</summary><pre>{_e(json.dumps(report['recipe'], indent=2))}</pre></details>")
    terms = "".join(f"<dt>{_e(key)}</dt><dd>{_e(text)}</dd>" for key, text in report["definitions"].items())
    body.append(f"<details><summary>What the figures mean</summary><dl>{terms}</dl></details>")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{meta}<title>{_e(report['name'])}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>' + "\n".join(body) + "</body></html>\n"


def figures(report: Mapping[str, Any]) -> list[str]:
    """Headings and plots; a plot that has nothing to show is left out."""
    runs = [run for run in report["runs"] if "error" not in run]
    drafted = [run for run in runs if run["per_position"]]
    plots = [
        (
            "Acceptance per position",
            "Share of drafts in which a position, and all before it, was accepted.",
            drafted and _positions(drafted),
        ),
        (
            "Acceptance length and tokens per step",
            "Filled: tokens a draft yields, as vLLM counts it. Outline: tokens per target step, steps without a draft included; "
            "n-gram and suffix draft in few steps only. Arrow: what training estimated for the head.",
            drafted and _lengths(drafted),
        ),
        (
            "Output tokens per second",
            "Whole prompt set, prefills included; the figure is the speed-up over the baseline.",
            runs and _speeds(runs),
        ),
        ("Learning curve", "Acceptance length estimated on held-out rows while the head was trained.", _learning(report["learning_curve"])),
    ]
    wide = len({(run["prompts"], run["temperature"]) for run in runs}) > 1
    sections = [
        f'<section class="{"wide" if wide else ""}"><h2>{title}</h2><p class="sub">{_e(text)}</p>{svg}</section>'
        for title, text, svg in plots
        if svg
    ]
    return ['<div class="plots">', *sections, "</div>"]


def _cards(report: Mapping[str, Any]) -> str:
    """The head's fastest run on each prompt set and temperature."""
    method = report["recipe"]["method"]
    runs = [r for r in report["runs"] if "error" not in r and r["method"] == method]
    cards = []
    for prompts, temperature in dict.fromkeys((r["prompts"], r["temperature"]) for r in runs):
        best = max((r for r in runs if (r["prompts"], r["temperature"]) == (prompts, temperature)), key=lambda r: r["speedup"] or 0)
        speed = f"{best['speedup']:.2f}× baseline<br>" if best["speedup"] else ""
        settings = f"{_e(prompts)}, T={temperature:g}<br>k={best['k']}, concurrency {best['concurrency']}"
        cards.append(f'<div class="card"><b>AL {best["acceptance_length"]:.2f}</b>{speed}<span>{settings}</span></div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_e(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _e(text: Any) -> str:
    return html.escape(str(text))


def _nested(item: str) -> str:
    """A finding as HTML; further lines become a list under the first."""
    first, *more = item.splitlines()
    return _e(first) + ("<ul>" + "".join(f"<li>{_e(line)}</li>" for line in more) + "</ul>" if more else "")


# ------------------------------------------------------------------------------------------------------------ the plots


def _axes(n: int, width: float = 5.4, height: float = 3.2) -> tuple[Any, list[Any]]:
    """A figure of n panels side by side, at most two a row. Matplotlib is drawn without a display and without pyplot's state."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "headstart", "font.family": "sans-serif", "font.size": 9}
    columns = min(n, 2)
    rows = -(-n // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)  # type: ignore[union-attr, call-arg]
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(n)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e6eaf0", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any) -> str:
    """A figure as an <svg> element without the XML prolog."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _places(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by prompt set and temperature, at the lowest concurrency: acceptance does not depend on it."""
    lowest = min(run["concurrency"] for run in runs)
    places: dict[str, list[Run]] = {}
    for run in runs:
        if run["concurrency"] == lowest:
            places.setdefault(f"{run['prompts']}, T={run['temperature']:g}", []).append(run)
    return places


def _name(run: Run) -> str:
    return f"{run['method']} k={run['k']}" if run["k"] else run["method"]


def _looks(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Colour by method, paler and another marker for each further k."""
    looks: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(run["method"] for run in runs):
        colour = {"baseline": GREY, "ngram": NGRAM, "suffix": SUFFIX}.get(method, HEAD)
        for i, k in enumerate(sorted({run["k"] for run in runs if run["method"] == method})):
            name = _name({"method": method, "k": k})
            looks[name] = {"color": colour, "alpha": max(0.35, 1 - 0.3 * i), "marker": "osD^v"[i % 5]}
    return looks


def _positions(runs: Sequence[Run]) -> str:
    places, looks = _places(runs), _looks(runs)
    figure, axes = _axes(len(places))
    for ax, (title, here) in zip(axes, places.items(), strict=True):
        for run in here:
            rates = run["per_position"]
            ax.plot(range(1, len(rates) + 1), rates, label=_name(run), markersize=4, **looks[_name(run)])
        ax.set(title=title, xlabel="drafted position", ylim=(0, 1), xticks=range(1, max(len(r["per_position"]) for r in here) + 1))
    axes[0].legend(frameon=False)
    axes[0].set_ylabel("accepted (unconditional)")
    return _svg(figure)


def _lengths(runs: Sequence[Run]) -> str:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    places, looks = _places(runs), _looks(runs)
    figure, axes = _axes(len(places))
    for ax, (title, here) in zip(axes, places.items(), strict=True):
        for i, run in enumerate(here):
            look = looks[_name(run)]
            ax.bar(i - 0.2, run["acceptance_length"], 0.38, color=look["color"], alpha=look["alpha"])
            ax.bar(i + 0.2, run["mean_accepted_tokens"], 0.38, facecolor="none", edgecolor=look["color"])
            for x, value in ((i - 0.2, run["acceptance_length"]), (i + 0.2, run["mean_accepted_tokens"])):
                ax.annotate(f"{value:.2f}", (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=7)
            if run["acceptance_length_estimate"]:
                ax.plot(i - 0.42, run["acceptance_length_estimate"], ">", color="#1c2330", markersize=6, zorder=3)
        top = max(max(r["acceptance_length"], r["mean_accepted_tokens"], r["acceptance_length_estimate"] or 0) for r in here)
        ax.set(
            title=title,
            xticks=range(len(here)),
            xticklabels=[_name(run).replace(" ", "\n") for run in here],
            ylim=(1, 1 + (top - 1) * 1.2 + 0.05),
        )
    axes[0].set_ylabel("tokens")
    handles: list[Any] = [Patch(color=HEAD, label="acceptance length"), Patch(facecolor="none", edgecolor=HEAD, label="tokens / step")]
    if any(run["acceptance_length_estimate"] for run in runs):
        handles.append(Line2D([], [], color="#1c2330", marker=">", linestyle="", markersize=6, label="AL~ (estimate)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return _svg(figure)


def _speeds(runs: Sequence[Run]) -> str:
    places: dict[str, list[Run]] = {}
    for run in runs:
        places.setdefault(f"{run['prompts']}, T={run['temperature']:g}", []).append(run)
    looks = _looks(runs)
    figure, axes = _axes(len(places))
    names = list(looks)
    for ax, (title, here) in zip(axes, places.items(), strict=True):
        concurrencies = sorted({run["concurrency"] for run in here})
        present = [name for name in names if any(_name(run) == name for run in here)]
        width = 0.8 / len(present)
        for run in here:
            x = concurrencies.index(run["concurrency"]) + (present.index(_name(run)) - (len(present) - 1) / 2) * width
            look = looks[_name(run)]
            label = _name(run) if run["concurrency"] == concurrencies[0] else None
            ax.bar(x, run["output_tokens_per_second"], width * 0.92, color=look["color"], alpha=look["alpha"], label=label)
            if run["speedup"] and run["method"] != "baseline":
                ax.annotate(
                    f"{run['speedup']:.2f}×",
                    (x, run["output_tokens_per_second"]),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
        ax.set(title=title, xticks=range(len(concurrencies)), xticklabels=[f"{c} in flight" for c in concurrencies])
        ax.margins(y=0.15)
    axes[0].set_ylabel("output tokens/s")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    return _svg(figure)


def _learning(points: Sequence[Mapping[str, Any]]) -> str:
    if len(points) < 2:
        return ""
    figure, (ax,) = _axes(1)
    by_tokens = all(point["supervised"] is not None for point in points)
    xs = [point["supervised"] if by_tokens else point["step"] for point in points]
    depths = list(points[-1]["al"])
    for i, k in enumerate(depths):
        ax.plot(
            xs,
            [point["al"].get(k) for point in points],
            label=f"k={k}",
            color=HEAD,
            alpha=0.3 + 0.7 * (i + 1) / len(depths),
            marker="o",
            markersize=3,
        )
    ax.set(xlabel="supervised tokens seen" if by_tokens else "training step", ylabel="AL~ (estimate)")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.legend(frameon=False)
    return _svg(figure)
