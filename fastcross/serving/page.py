"""The page of a server: what the model is, how good it was, and a form that scores a row and shows its exact parts.

One HTML text that loads nothing. What a column or a value is called stands escaped in the HTML, and as text in what the
script adds; the policy lets no other script and no other style run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastcross.models.dcn import DCN
from fastcross.serving.served import Column, Served

HINTS = {
    "dense": "a number",
    "categorical": "a text",
    "multi-valued": "values, with the separator between them",
    "weights": "a number per value",
    "date-time": "2024-01-31 12:30:00",
}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --up: #c0392b; --down: #2471a3; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
form { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .6rem 1rem; }
label { display: block; font-size: .85rem; } label span { opacity: .65; }
input, select { font: inherit; width: 100%; box-sizing: border-box; padding: .2rem .4rem; }
button { font: inherit; padding: .3rem 1.2rem; align-self: end; }
pre { border: 1px solid var(--line); border-radius: .3rem; overflow-x: auto; padding: .6rem .8rem; font-size: .85rem; }
#answer { font-size: 1.2rem; min-height: 1.8rem; } #answer.error { color: var(--up); font-size: 1rem; }
#parts { width: 100%; } #parts td:nth-child(2) { width: 45%; }
.track { position: relative; height: 1.1rem; }
.track div { position: absolute; height: 100%; min-width: 1px; background: #888; }
.track div.up { background: var(--up); } .track div.down { background: var(--down); }
.note { opacity: .7; font-size: .9rem; }
"""
_SCRIPT = """
const form = document.querySelector("form"), answer = document.getElementById("answer");
const parts = document.getElementById("parts"), facts = JSON.parse(form.dataset.facts), SHOWN = 12;

async function ask(path, body) {
  const response = await fetch(path, {method: "POST", body: JSON.stringify(body)});
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

function rowOf(form) {
  const row = {};
  for (const input of form.querySelectorAll("[data-column]")) {
    const text = input.value, isNumber = input.dataset.kind === "dense" && !isNaN(Number(text));
    row[input.dataset.column] = text.trim() === "" ? null : isNumber ? Number(text) : text;
  }
  return row;
}

function label(fields, row) {
  if (fields.length === 0) return "constant";
  if (fields[0] === "deep") return "deep network (unexplained)";
  if (fields[0] === "…") return "crosses of four fields and more";
  return fields.map(field => field in row ? `${field} = ${row[field] ?? "(missing)"}` : field).join(" × ");
}

function cell(line, text, kind) {
  const made = line.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function draw(found, row) {
  const [constant, ...rest] = found;
  rest.sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
  const sum = parts => parts.reduce((total, part) => total + part.effect, 0);
  const steps = [constant, ...rest.slice(0, SHOWN)].map(part => [label(part.fields, row), part.effect]);
  if (rest.length > SHOWN) steps.push([`${rest.length - SHOWN} smaller parts`, sum(rest.slice(SHOWN))]);
  let at = 0;
  const ends = steps.map(([, effect]) => at += effect);
  const low = Math.min(0, ...ends), width = Math.max(0, ...ends) - low || 1;
  at = 0;
  for (const [name, effect] of steps) {
    const line = parts.insertRow(), bar = document.createElement("div");
    cell(line, name);
    const track = document.createElement("div");
    track.className = "track";
    bar.style.left = `${100 * (Math.min(at, at + effect) - low) / width}%`;
    bar.style.width = `${100 * Math.abs(effect) / width}%`;
    if (name !== "constant") bar.className = effect > 0 ? "up" : "down";
    track.append(bar);
    cell(line, "").append(track);
    cell(line, (effect < 0 ? "−" : "+") + Math.abs(effect).toFixed(4), "n");
    at += effect;
  }
  const line = parts.insertRow();
  cell(line, facts.sum); cell(line, ""); cell(line, at.toFixed(4), "n");
}

const commands = document.querySelector("pre");
commands.textContent = commands.textContent.replaceAll("$URL", location.href.replace(/\\/$/, ""));

form.addEventListener("submit", async event => {
  event.preventDefault();
  const row = rowOf(form), output = Number(form.elements.output?.value ?? 0);
  answer.textContent = ""; answer.className = ""; parts.replaceChildren();
  try {
    const found = (await ask("predict", {rows: [row]}))[facts.output][0];
    const texts = (Array.isArray(found) ? found : [found]).map((p, i) => `${facts.labels[i]}: ${p.toPrecision(5)}`);
    answer.textContent = texts.join(", ");
    if (facts.explainable) draw((await ask("explain", {row, class: output})).parts, row);
  } catch (error) {
    answer.textContent = error.message;
    answer.className = "error";
  }
});
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def write_page(served: Served) -> str:
    name, labels = escape(served.name), _labels(served)
    facts = {
        "output": served.output,
        "labels": labels,
        "explainable": served.explainable,
        "sum": "the prediction" if served.regression else "the logit",
    }
    several = len(labels) > 1 and served.explainable
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title><link rel="icon" href="data:,">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head>",
            f"<body><h1>{name}</h1>",
            f"<p>{escape(_what(served))}</p>",
            *_metrics(served.metrics),
            "<h2>Score a row</h2>",
            f'<form data-facts="{escape(json.dumps(facts))}">',
            *(_field(i, column) for i, column in enumerate(served.columns)),
            *(_choice(labels) if several else ()),
            "<button>Score</button></form>",
            '<p id="answer" role="status"></p><table id="parts"></table>',
            f'<p class="note">{escape(_note(served))}</p>',
            "<h2>Ask it from a program</h2>",
            f"<pre>{escape(_commands(served))}</pre>",
            '<p><a href="metrics">Metrics for Prometheus</a>, '
            f'<a href="v2/models/{name}">the Open Inference Protocol</a>.</p>',
            f"<script>{_SCRIPT}</script></body></html>",
        )
    )


def _what(served: Served) -> str:
    config, schema = served.model.config, served.trained.schema
    kind = type(served.model).__name__
    if isinstance(served.model, DCN):
        deep = " × ".join(map(str, config.deep_layers)) or "none"
        kind += f" ({config.structure}), {config.cross_layers} cross layers ({config.cross_type}), deep layers {deep}"
    numbers = sum(parameter.numel() for parameter in served.model.parameters())
    what = "a quantity" if served.regression else f"the classes {', '.join(served.classes)}"
    ids = f"{sum((*schema.cardinalities, *schema.bag_cardinalities)):,}"
    items = "" if served.ranker is None else f" It ranks {len(served.ranker):,} items."
    return f"{kind}. {numbers:,} parameters, {len(served.columns)} columns, {ids} ids. It predicts {what}.{items}"


def _labels(served: Served) -> list[str]:
    """What each number of an answer is."""
    if served.regression:
        return ["prediction"]
    shown = served.classes[1:] if len(served.classes) == 2 else served.classes
    return [f"probability of {name}" for name in shown]


def _metrics(metrics: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    names = [*dict.fromkeys(name for values in metrics.values() for name in values)]
    if not names:
        return
    head = "".join(f"<th class=n>{escape(name)}</th>" for name in names)
    yield f"<h2>Metrics</h2><table><tr><th></th>{head}</tr>"
    for part, values in metrics.items():
        numbers = (f"{values[name]:.4g}" if isinstance(values.get(name), int | float) else "" for name in names)
        yield f"<tr><th>{escape(part)}</th>" + "".join(f"<td class=n>{number}</td>" for number in numbers) + "</tr>"
    yield "</table>"


def _field(i: int, column: Column) -> str:
    name, kind, hint = escape(column.name), escape(column.kind), escape(HINTS[column.kind])
    options = "".join(f'<option value="{escape(value)}">' for value in column.examples)
    field = f'<input data-column="{name}" data-kind="{kind}" placeholder="{hint}" list="values-{i}">'
    return f'<label>{name} <span>{kind}</span>{field}</label><datalist id="values-{i}">{options}</datalist>'


def _choice(labels: list[str]) -> Iterator[str]:
    options = "".join(f'<option value="{i}">{escape(text)}</option>' for i, text in enumerate(labels))
    yield f'<label>parts of the logit of <select name="output">{options}</select></label>'


def _note(served: Served) -> str:
    missing = "A field that is left empty is a missing value."
    if not served.explainable:
        return missing
    whole = "it" if served.regression else "the logit"
    over = "the fields' means over training rows" if served.baseline.any() else "0, for the training data is not here"
    return (
        f"{missing} The parts add up to {whole} exactly; they are deviations from {over}. What the deep network adds "
        "is one part, unexplained."
    )


def _commands(served: Served) -> str:
    """The script puts the page's address in place of $URL."""
    row: dict[str, Any] = {
        column.name: 1 if column.kind == "dense" else next(iter(column.examples), None)
        for column in served.columns
        if column.kind not in ("multi-valued", "weights")
    }
    row = {column.name: row.get(column.name) for column in served.columns}
    requests: dict[str, dict[str, Any]] = {"predict": {"rows": [row]}}
    if served.ranker is not None:
        context = {name: row[name] for name in served.ranker.context_columns}
        requests["rank"] = {"context": context, "k": min(3, len(served.ranker))}
    bodies = {path: shlex.quote(json.dumps(body, ensure_ascii=False)) for path, body in requests.items()}
    return "\n".join(f"curl -d {body} $URL/{path}" for path, body in bodies.items())
