"""The README's table, and what else is worth knowing in a line each, for docs/benchmarks.md.

Every sentence is written here from the measurements, the cautious ones too: a spread that covers 1 is no gain and no
loss, and a ratio of two optimisers says which two.
"""

from benchmarks.contestants import COPY, DEEPCTR, DNN, EAGER, OURS, TORCHFM, Contestant, deep, same_adam
from benchmarks.report import tables
from benchmarks.report.runs import Case, Spread, Suite


def summary(suites: dict[str, Suite]) -> str:
    suite = suites["cross_network"]
    case = suite.of_kind("operator")[0]
    rows = []
    for name in case.names:
        gain = "" if name in (OURS.name, COPY.name) else tables.spread(case.ratio(name, OURS.name))
        kept, peak = (tables.size(case.weight(name, what)) for what in ("kept_bytes", "peak_bytes"))
        rows.append([name, tables.duration(case.seconds(name).middle), gain, kept, peak])
    rows += [[name, "missing", "", "", ""] for name in case.missing]
    header = ["", "time", "fastcross is faster by", "kept for backward", "peak memory"]
    on, kind = suite.machine, case.workload
    runs = "One run" if suite.runs == 1 else f"Medians of the medians of {suite.runs} runs"
    lines = [
        f"Forward and backward pass of the paper's {kind['layers']} cross layers: {kind['rows']} rows,"
        f" {kind['d']} features, {kind['dtype']}.",
        tables.markdown(header, rows),
        f"{runs} on {on.get('gpu') or on['processor']}, {on['threads']} threads; in brackets the 20th to 80th"
        " percentile of the rounds' ratios. [All measurements, with commands, versions and definitions]"
        "(docs/benchmarks.md).",
    ]
    return "\n\n".join(lines)


def facts(suites: dict[str, Suite]) -> list[str]:
    """What no single table shows, where it was measured."""
    steps = suites["model_step"].of_kind("training step") if "model_step" in suites else []
    grid = suites["cross_network_grid"].cases if "cross_network_grid" in suites else []
    return [
        *_network(suites["cross_network"]),
        *([_grid(grid)] if grid else []),
        *(fact for case in steps for fact in _step(case)),
    ]


def _network(suite: Suite) -> list[str]:
    case, depths = suite.of_kind("operator")[0], suite.of_kind("depths")[0]

    def growth(contestant: Contestant, layers: int) -> str:
        return tables.spread(depths.ratio(deep(contestant, layers).name, deep(contestant, 1).name))

    kept = [case.weight(contestant.name, "kept_bytes") or 0.0 for contestant in (EAGER, OURS)]
    return [
        f"A forward and backward pass takes {tables.spread(case.ratio(OURS.name, COPY.name))} the time of a copy of x0;"
        f" the least that the closed form has to move is {case.workload['floor_copies']:g} copies.",
        f"12 layers take {growth(OURS, 12)} the time of 1 layer, 32 layers {growth(OURS, 32)}; in the eager loop 12"
        f" layers take {growth(EAGER, 12)}.",
        f"For the backward pass it keeps 1/{kept[0] / kept[1]:.0f} of what the eager loop keeps.",
    ]


def _grid(cases: list[Case]) -> str:
    gains = {case: case.ratio(EAGER.name, OURS.name) for case in cases if case.has(OURS, EAGER)}
    shapes, measured = {}, [*gains]
    for case in measured:
        shapes[case] = ", ".join(f"{symbol} = {case.workload[key]}" for symbol, key in _SYMBOLS)
    least, most = (choose(measured, key=lambda case: gains[case].middle) for choose in (min, max))
    slower = sum(gain.high < 1 for gain in gains.values())
    noise = sum(gain.covers_one for gain in gains.values())
    return (
        f"On a grid of {len(gains)} shapes it is between {gains[least].middle:.3g}× ({shapes[least]}) and"
        f" {gains[most].middle:.3g}× ({shapes[most]}) as fast as the eager loop; slower on {slower} of them, within"
        f" noise of it on {noise}."
    )


_SYMBOLS = (("B", "rows"), ("d", "d"), ("L", "layers"))


def _step(case: Case) -> list[str]:
    """A training step beside its own DNN, and beside the packages' models."""
    found = []
    if case.has(OURS, EAGER, DNN):
        ours, loop = (case.ratio(contestant.name, DNN.name) for contestant in (OURS, EAGER))
        found.append(
            f"DCN's {case.title}: {_more_than_its_part(ours)} the time of its DNN alone (cross layers one by one:"
            f" {_more_than_its_part(loop)})."
        )
    for rival in (DEEPCTR, TORCHFM):
        if case.has(OURS, rival):
            found.append(_beside(case, rival))
    return found


def _more_than_its_part(ratio: Spread) -> str:
    """A DCN's step contains its DNN's: what is measured below 1 can only be noise."""
    return f"within noise of 1× ({ratio.low:.3g} to {ratio.high:.3g})" if ratio.low <= 1 else tables.spread(ratio)


def _beside(case: Case, rival: Contestant) -> str:
    as_it_comes = _gain(case.ratio(rival.name, OURS.name))
    text = (
        f"DCN's {case.title}: {as_it_comes} as fast as {rival.name}'s as it comes, whose Adam updates whole tables"
        " while fastcross's updates the rows of the batch"
    )
    if case.has(same_adam(rival)):
        text += f"; {_gain(case.ratio(same_adam(rival).name, OURS.name))} as fast with the same optimiser in both"
    return text + "."


def _gain(ratio: Spread) -> str:
    return f"within noise of 1× ({ratio.low:.3g} to {ratio.high:.3g})" if ratio.covers_one else tables.spread(ratio)
