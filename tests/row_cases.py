"""Tables, what an optimiser keeps of them, and gradients in the form that a GPU has: for the tests of row updates."""

import torch

HEIGHT, LR, EPS, STEP = 12, 0.1, 1e-3, 3
# Equal rows form runs; the last has more entries than a program of a wide table, and runs that go from one to the next.
ROWS = [[0, 0, 1, 4, 4, 4, 11, 11], [3], [2, 5, 5, 7, 11], [0] * 17 + [2] * 14 + [5] + [7] * 9]
UPDATES = ("adam", "adamw", "adagrad", "row-wise", "sgd")
NAMES = {"adam": "adam_rows", "adamw": "adam_rows", "adagrad": "adagrad_rows", "row-wise": "adagrad_rows"}


def draw(widths, dtype, name, place=torch.clone, rows=ROWS):
    """Tables, for each the tuple of what is kept of it, and gradients: slices of one buffer of rows, one of values."""
    generator = torch.Generator().manual_seed(sum(widths))

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    tables = [place(normal(HEIGHT, width)) for width in widths]
    kept = []
    for width in widths:
        shape = (HEIGHT,) if name == "row-wise" else (HEIGHT, width)
        squares = place(normal(*shape).square())
        kept.append({"sgd": (), "adam": (place(normal(*shape)), squares)}.get(name.removesuffix("w"), (squares,)))
    chosen = [rows[k % len(rows)] for k in range(len(widths))]
    all_rows = place(torch.tensor([row for each in chosen for row in each]))
    values = [normal(len(each), width) for each, width in zip(chosen, widths, strict=True)]
    for each, value in zip(chosen, values, strict=True):
        value[[i for i in range(1, len(each)) if each[i] == each[i - 1]]] = 0
    flat = place(torch.cat([value.flatten() for value in values]))
    parts = zip(all_rows.split([len(each) for each in chosen]), flat.split([v.numel() for v in values]), strict=True)
    return tables, kept, [(r, v.view(len(r), width)) for (r, v), width in zip(parts, widths, strict=True)]


def update(kernels, name, tables, kept, gradients, lr=LR, step=STEP):
    if name == "sgd":
        return kernels.sgd_rows(tables, gradients, lr)
    if name in ("adagrad", "row-wise"):
        return kernels.adagrad_rows(tables, [s for (s,) in kept], gradients, lr, EPS, name == "row-wise")
    return kernels.adam_rows(tables, kept, gradients, lr, (0.9, 0.99), EPS, step, 0.2 if name == "adamw" else 0.0)


def compact(gradients):
    """The same gradients with each row once."""
    heads = [torch.tensor([i == 0 or r[i] != r[i - 1] for i in range(len(r))]) for r, _ in gradients]
    return [(rows[head], values[head]) for (rows, values), head in zip(gradients, heads, strict=True)]


def exact(name, table, kept, rows, values, lr=LR, step=STEP):
    """The equations in float64, row by row: the table and what is kept of it, afterwards."""
    w, kept = table.double().clone(), [moment.double().clone() for moment in kept]
    for row, g in dict(reversed(list(zip(rows.tolist(), values.double(), strict=True)))).items():
        if name == "sgd":
            w[row] -= lr * g
        elif name in ("adagrad", "row-wise"):
            kept[0][row] += g.square().mean() if name == "row-wise" else g.square()
            w[row] -= lr * g / (kept[0][row].sqrt() + EPS)
        else:
            m, v = kept
            m[row] += 0.1 * (g - m[row])
            v[row] += 0.01 * (g * g - v[row])
            w[row] *= 1 - lr * (0.2 if name == "adamw" else 0.0)
            w[row] -= lr * m[row] / (1 - 0.9**step) / ((v[row] / (1 - 0.99**step)).sqrt() + EPS)
    return [w, *kept]


def copied(tables, kept):
    return [t.clone() for t in tables], [tuple(moment.clone() for moment in each) for each in kept]
