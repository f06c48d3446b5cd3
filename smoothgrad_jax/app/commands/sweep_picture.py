"""Picture of a sweep: the measures of all configurations, and their held-out curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smoothgrad_jax.app.commands.output import log

Row = Mapping[str, Any]  # of `sweep.json`
Point = tuple[Any, Any]  # x, y

_PANELS = {
    "score": "held-out score, nats per word",
    "npmi": "coherence (NPMI)",
    "effective_topics": "effective topics",
    "diversity": "diversity of the top words",
    "stability": "stability over seeds",
}


class Curve(NamedTuple):
    """The held-out scores of a run of a configuration, as (passes, score)."""

    name: str
    points: Sequence[Point]


def draw(path: Path, rows: Sequence[Row], curves: Sequence[Curve], title: str) -> Path | None:
    """Draw one panel per measure, one point per run and a line through the means, and a panel of held-out curves.

    Returns:
      The path; None without matplotlib, after a message.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log('install matplotlib for a picture: pip install "smoothgrad_jax[plot]"')
        return None
    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium"}):
        figure = Figure(figsize=(11, 6.5), layout="constrained")
        FigureCanvasAgg(figure)
        *panels, last = figure.subplots(2, 3).flat
        for axes, (name, label) in zip(panels, _PANELS.items(), strict=True):
            _draw_measure(axes, rows, name)
            axes.set_title(label, loc="left")
        _draw_curves(last, curves)
        figure.suptitle(title, x=0.01, ha="left", wrap=True, fontsize="medium")
        figure.savefig(path, dpi=130)
    return path


def _draw_measure(axes: Any, rows: Sequence[Row], name: str) -> None:
    """Draw one measure against K, one line per window; against the window if all runs have the same K."""
    topics, windows = (list(dict.fromkeys(row[key] for row in rows)) for key in ("topics", "window"))
    by_topics = len(topics) > 1 or len(windows) == 1
    ticks, axis, lines = (topics, "topics", windows) if by_topics else (windows, "window", topics)
    for line in lines:
        of_line = [row for row in rows if row["window" if by_topics else "topics"] == line and row[name] is not None]
        if not of_line:
            continue
        points = [(ticks.index(row[axis]), row[name]) for row in of_line]
        positions = sorted({x for x, _ in points})
        values = [[y for x, y in points if x == position] for position in positions]
        means = [sum(each) / len(each) for each in values]
        label = f"L = {line}" if by_topics and len(lines) > 1 else None
        (drawn,) = axes.plot(positions, means, linewidth=1.2, label=label)
        axes.plot(*zip(*points, strict=True), ".", color=drawn.get_color(), markersize=7)
        chosen = [point for point, row in zip(points, of_line, strict=True) if row["recommended"]]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), "o", markersize=12, markerfacecolor="none", color="black")
        if label:
            axes.legend(frameon=False, fontsize="small")
    if not any(row[name] is not None for row in rows):
        axes.text(0.5, 0.5, "needs --seeds 2 or more", transform=axes.transAxes, ha="center", color="gray")
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.set_xlim(-0.5, len(ticks) - 0.5)
    axes.set_xlabel("number of topics K" if by_topics else "window L")


def _draw_curves(axes: Any, curves: Sequence[Curve]) -> None:
    for curve in curves:
        axes.plot(*zip(*curve.points, strict=True), linewidth=1.2, label=curve.name)
    axes.set_title("held-out score during the first run", loc="left")
    axes.set_xlabel("effective passes")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
