"""Many candidates for one context: what an item adds is tabulated once, what the context adds is found once a request.

x0 is the items' columns and the context's, so each product of x0 with a weight is a sum of two, of which one differs
from item to item (kernels/closed_form.py has the recurrence):

    p_l = w_l·x0 = w_l·x_item + w_l·x_context,  the same for q = V x0       L + C numbers per item
    W_1 x0 = W_1 x_item + W_1 x_context                                     H more, where there is a deep network
    h = ReLU(W_1 x0 + b)              parallel
    h = ReLU(α_L W_1 x0 + W_1 β_L + b)    stacked, for x_L = α_L x0 + β_L

Batch normalisation is part of W and b. All of it is exact for the rank-one cross network. The other cross types do not
split so: their items keep their columns of x0, and full rows are scored.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastcross.batch import Bag, Batch
from fastcross.files import atomic_with_checksum, damage, undisturbed
from fastcross.models.dcn import DCN
from fastcross.models.fold import describe, dots_and_constants, is_rank_one
from fastcross.ops.cross_network import folded_logits
from fastcross.ops.embedding import embedding_stack
from fastcross.serving.linear import Linear, linear_layers

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcross.data.encoder import Encoder
    from fastcross.data.prediction import RowEncoder

AT_ONCE = 1024  # items whose hidden units are computed at once: few enough for the cache, enough for a GEMM
FORMAT = "fastcross.ranker.1"
Items = Any  # a table (Arrow, pandas, polars, a mapping of columns) of raw values, or a Batch


class Ranker:
    """Scores items for a context, as the model scores their full rows.

    Args:
        model: a run folder, what :func:`fastcross.training.load_model` read from it, a fitted estimator; or a DCN, for
            encoded features.
        items: a table of the items' raw values: those of its columns that the model reads are the items', all others
            of the model's are the context's. For a DCN a :class:`~fastcross.batch.Batch` of the items' features alone.
        key: the name of the column that holds the items' names, or a sequence of names; None numbers them from 0.
        features: of a DCN's features, in the order of x0 (single-valued, bags, dense), the numbers of the items'.

    A score is what the model gives: a logit (its sigmoid is the probability), C of them, or a quantity. The ranker
    stands for the model as it is now: a model that is trained further is noticed, and refused.
    """

    def __init__(
        self,
        model: Any,
        items: Items,
        *,
        key: str | Sequence[Any] | None = None,
        features: Sequence[int] | None = None,
    ) -> None:
        self.model, encoder = _open(model)
        if isinstance(items, Batch) != (features is not None) or (features is None and encoder is None):
            raise TypeError("items must be a table for a trained run, or a Batch with features= for a DCN")
        columns: list[str] = []
        if encoder is not None and features is None:
            items = as_table(items)
            columns = [name for name in _inputs(encoder) if name in items.column_names]
            features = _features_of(encoder, columns)
        assert features is not None
        self._prepare(sorted({*features}), encoder, columns)
        self.key = key if isinstance(key, str) else None
        self.keys: list[Any] = []
        self._row: dict[Any, int] = {}
        self._next = 0  # the next number, of items without names
        self._cross = self._hidden = torch.empty(0)
        self.add(items, None if isinstance(key, str) else key)

    def _prepare(self, features: Sequence[int], encoder: Encoder | None, columns: Sequence[str]) -> None:
        """All that does not depend on the items."""
        self.features, self.encoder, self.columns = list(features), encoder, list(columns)
        stack = self.model.embedding
        count = len(stack.columns())
        if not features or features[0] < 0 or features[-1] >= count:
            raise ValueError(f"features must be some of the model's {count}, from 0; got {list(features)}")
        self._item = _Part(self.model, features)
        self._context = _Part(self.model, [f for f in range(count) if f not in self.features])
        self.split = is_rank_one(self.model) or not self.model.config.cross_layers
        if not self.split:
            warnings.warn(
                f"full rows are scored, for their network does not split: {describe(self.model)}", stacklevel=4
            )
        else:
            self._weights = _Weights(self.model)
            for part in (self._item, self._context):
                part.vectors = self._weights.vectors[:, part.at].T
                part.first = Linear(self._weights.first[:, part.at].contiguous(), None)
        self._parameters = [*self.model.parameters(), *self.model.buffers()]
        self._versions = [t._version for t in self._parameters]
        if encoder is not None:
            from fastcross.data.prediction import RowEncoder

            others = [name for name in _inputs(encoder) if name not in columns]
            self._items_encoder = encoder.only(columns)
            self.context_columns = tuple(others)
            self.context_encoder: RowEncoder = RowEncoder(encoder.only(others))

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __repr__(self) -> str:
        how = "tabulated" if self.split else "full rows are scored"
        return f"Ranker({len(self):,} items, {how}, {self.bytes_per_item:,} bytes each)"

    @property
    def bytes_per_item(self) -> int:
        return sum(t.shape[1] * t.itemsize for t in (self._cross, self._hidden))

    # ---- items

    def add(self, items: Items, keys: Sequence[Any] | None = None) -> None:
        """More items; a ValueError where one of them is there already."""
        table, keys = self._named(items, keys)
        for key in keys:
            if key in self._row:
                raise ValueError(f"the item {key!r} is there already; update() replaces it")
        first = len(self)
        cross, hidden = self._tabulate(table, len(keys))
        self._cross = _extended(self._cross, first, cross)
        self._hidden = _extended(self._hidden, first, hidden)
        self._row |= {key: row for row, key in enumerate(keys, first)}
        self.keys += keys
        self._next = max(self._next, len(self))

    def update(self, items: Items, keys: Sequence[Any] | None = None) -> None:
        """New values for items that are there; a KeyError names one that is not."""
        table, keys = self._named(items, keys)
        rows = self._rows(keys)
        cross, hidden = self._tabulate(table, len(keys))
        self._cross[rows], self._hidden[rows] = cross, hidden

    def remove(self, keys: Iterable[Any]) -> None:
        """Without these items; the last ones take their places in :attr:`keys`."""
        keys = list(keys)
        if len({*keys}) < len(keys):
            raise ValueError("an item is to be removed twice")
        self._rows(keys)
        for key in keys:
            row, last = self._row.pop(key), len(self) - 1
            moved = self.keys.pop()
            if row < last:
                self._cross[row], self._hidden[row] = self._cross[last], self._hidden[last]
                self.keys[row], self._row[moved] = moved, row

    def _named(self, items: Items, keys: Sequence[Any] | None) -> tuple[Items, list[Any]]:
        if not isinstance(items, Batch):
            items = as_table(items)
            if missing := [name for name in self.columns if name not in items.column_names]:
                raise ValueError(f"the items need the columns {', '.join(self.columns)}; missing: {', '.join(missing)}")
        if keys is None and self.key is not None:
            if self.key not in items.column_names:
                raise ValueError(f"the items have no column {self.key}; theirs are {', '.join(items.column_names)}")
            keys = items[self.key].to_pylist()
        keys = list(range(self._next, self._next + len(items))) if keys is None else list(keys)
        if len(keys) != len(items):
            raise ValueError(f"each item needs a name; got {len(items):,} items and {len(keys):,} names")
        seen: set[Any] = set()
        for row, key in enumerate(keys):
            if key is None or key in seen or not isinstance(key, str | int):
                what = "is there twice" if key in seen else "must be a text or an integer"
                raise ValueError(f"row {row + 1} of the items: the name {key!r} {what}")
            seen.add(key)
        return items, keys

    def _tabulate(self, items: Items, count: int) -> tuple[Tensor, Tensor]:
        """The items' numbers: (N, K) and (N, H)."""
        self._check_model()
        batches = self._batches(items) if count else (_no_rows(self._item),)
        cross, hidden = zip(*(self._projected(self._item, batch) for batch in batches), strict=True)
        return torch.cat(cross), torch.cat(hidden)

    def _batches(self, items: Items) -> Iterator[Batch]:
        if isinstance(items, Batch):
            yield items
            return
        from fastcross.data.prediction import read_for_prediction

        yield from read_for_prediction(items, self._items_encoder, batch_size=1 << 14)

    def _projected(self, part: _Part, batch: Batch) -> tuple[Tensor, Tensor]:
        """What some of the columns add: to the L + C dots, and to the first layer's hidden units (or x0 itself)."""
        with torch.no_grad():
            x0 = part.x0(batch)
            if not self.split:
                return x0.new_empty((len(x0), 0)), x0
            return (x0.double() @ part.vectors).to(self._weights.dtype), part.first(x0)

    # ---- scores

    def score(self, context: Mapping[str, Any] | Batch | pa.Table, items: Iterable[Any] | None = None) -> Tensor:
        """(N,), or (N, C) for several outputs: a score for each of :attr:`keys`, or of ``items``, in that order.

        context: the other columns' values, by name; or a Batch of one row of the other features, as the items are one.
        """
        self._check_model()
        rows = None if items is None else torch.tensor(self._rows(list(items)), device=self._cross.device).long()
        dots, hidden = self._projected(self._context, self._encoded(context))
        with torch.no_grad():
            scored = (self._folded if self.split else self._full)(dots, hidden, rows)
            return self.model._squeeze(scored)

    def top(
        self,
        context: Mapping[str, Any] | Batch | pa.Table,
        k: int = 10,
        *,
        items: Iterable[Any] | None = None,
        output: int = 0,
    ) -> list[tuple[Any, float]]:
        """The k best items, best first, each with its score.

        items: only these; output: by which of several outputs.
        """
        chosen = None if items is None else list(items)
        count = len(self) if chosen is None else len(chosen)
        if not 1 <= k <= count:
            raise ValueError(f"k must be from 1 to the number of items, {count:,}; got {k}")
        outputs = self.model.config.num_outputs
        if not 0 <= output < outputs:
            raise ValueError(f"output must be one of {outputs}, from 0; got {output}")
        scores = self.score(context, chosen)
        best = (scores if scores.dim() == 1 else scores[:, output]).topk(k)
        names = self.keys if chosen is None else chosen
        return [(names[i], value) for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def _folded(self, dots: Tensor, hidden: Tensor, rows: Tensor | None) -> Tensor:
        w, config, count = self._weights, self.model.config, len(self)
        z = None
        if w.constants.numel():
            starts = None if rows is None else rows.new_tensor([0, count])
            ids = None if rows is None else rows[:, None]
            z = folded_logits(
                self._cross[:count],
                dots + w.base,
                w.constants,
                config.cross_layers,
                ids,
                starts,
                backend=config.backend,
            )
        if not w.layers:
            assert z is not None
            return z
        bias, alpha = hidden + w.bias, z if w.stacked else None
        out = []
        for first in range(0, count if rows is None else len(rows), AT_ONCE):
            at = slice(first, first + AT_ONCE)
            h = self._hidden[:count][at] if rows is None else self._hidden[rows[at]]
            h = (h + bias if alpha is None else torch.addcmul(w.bias, alpha[at], h + hidden)).relu_()
            for layer in w.layers:
                h = layer(h)
            out.append(h)
        logits = torch.cat(out) if out else hidden.new_empty((0, config.num_outputs))
        return logits if z is None or w.stacked else logits + z

    def _full(self, _: Tensor, context: Tensor, rows: Tensor | None) -> Tensor:
        """The logits of full rows."""
        items = self._hidden[: len(self)] if rows is None else self._hidden[rows]
        was_training, out = self.model.training, []
        self.model.eval()
        try:
            for some in items.split(AT_ONCE) if len(items) else (items,):
                x0 = some.new_empty((len(some), self.model.embedding.out_features))
                x0[:, self._item.at], x0[:, self._context.at] = some, context.expand(len(some), -1)
                out.append(self.model.logits_of(x0))
        finally:
            self.model.train(was_training)
        return torch.cat(out)

    def _encoded(self, context: Any) -> Batch:
        if isinstance(context, Batch):
            batch = context
        elif self.encoder is None:
            raise TypeError(f"the context of encoded items must be a Batch; got {type(context).__name__}")
        else:
            rows = [context] if isinstance(context, Mapping) else as_table(context).to_pylist()
            batch, _ = self.context_encoder(rows)
        if len(batch) != 1:
            raise ValueError(f"a context is one row; got {len(batch):,}")
        return batch

    def _rows(self, keys: Sequence[Any]) -> list[int]:
        try:
            return [self._row[key] for key in keys]
        except (KeyError, TypeError):
            unknown = next(key for key in keys if not isinstance(key, str | int) or key not in self._row)
            raise KeyError(f"no item {unknown!r} among {len(self):,}") from None

    def _check_model(self) -> None:
        if self._versions != [t._version for t in self._parameters]:
            raise RuntimeError("the model has changed since its items were tabulated; make a new Ranker")

    # ---- on disk

    def save(self, path: str | PathLike[str]) -> None:
        """Write the items' numbers to a safetensors file, with a checksum beside it."""
        from safetensors.torch import save_file

        count = len(self)
        names = torch.frombuffer(bytearray(json.dumps(self.keys).encode()), dtype=torch.uint8)
        tensors = {"cross": self._cross[:count], "hidden": self._hidden[:count], "keys": names}
        facts = {"features": self.features, "columns": self.columns, "key": self.key, "next": self._next}
        metadata = {"format": FORMAT, "model": digest(self.model, self.encoder), "facts": json.dumps(facts)}
        with atomic_with_checksum(Path(path)) as temporary:
            save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, temporary, metadata)

    @classmethod
    def load(cls, path: str | PathLike[str], model: Any) -> Ranker:
        """What :meth:`save` wrote; a ValueError where the file is damaged or of another model."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        made = cls.__new__(cls)
        made.model, encoder = _open(model)
        metadata, tensors = undisturbed(path, lambda: _read(path))
        if (expected := digest(made.model, encoder)) != metadata["model"]:
            raise ValueError(f"{path} is of another model: {metadata['model'][:12]}; this one is {expected[:12]}")
        facts = json.loads(metadata["facts"])
        made._prepare(facts["features"], encoder, facts["columns"])
        made.key, made._next = facts["key"], facts["next"]
        device = made._parameters[0].device
        made._cross, made._hidden = (tensors[name].to(device) for name in ("cross", "hidden"))
        made.keys = json.loads(tensors["keys"].numpy().tobytes())
        made._row = {key: row for row, key in enumerate(made.keys)}
        return made


class _Part:
    """Some of a model's features, whose columns of x0 are ``at``, and the weights that multiply these."""

    vectors: Tensor
    first: Linear

    def __init__(self, model: DCN, features: Sequence[int]) -> None:
        stack = model.embedding
        self.pooling, self.single = stack.bag_pooling, stack.num_single
        columns, tables = stack.columns(), len(stack.tables)
        self.tables = [stack.tables[f] for f in features if f < tables]
        self.counts = (
            sum(f < stack.num_single for f in features),
            sum(stack.num_single <= f < tables for f in features),
            sum(f >= tables for f in features),
        )
        parameter = next(model.parameters())
        self.like = parameter.new_empty(0)
        places = [torch.arange(columns[f].start, columns[f].stop) for f in features]
        self.at = torch.cat(places).to(parameter.device) if places else torch.empty(0, dtype=torch.long)

    def x0(self, batch: Batch) -> Tensor:
        batch = batch.to(self.like.device)
        found = batch.categorical.shape[1], len(batch.bags), batch.dense.shape[1]
        if found != self.counts:
            raise ValueError(
                f"there must be {self.counts[0]} single-valued features, {self.counts[1]} bags and {self.counts[2]} "
                f"dense ones; got {found[0]}, {found[1]} and {found[2]}"
            )
        if not torch.isfinite(batch.dense).all():
            raise ValueError("dense features must be finite; got NaN or infinity")
        tables = tuple(table.detach() for table in self.tables)
        dense = batch.dense.to(self.like.dtype)
        return embedding_stack(dense, batch.categorical, tables, batch.bags, pooling=self.pooling)


class _Weights:
    """The model's, as sums of items and contexts need them; batch normalisation is part of the layers."""

    def __init__(self, model: DCN) -> None:
        config, d = model.config, model.embedding.out_features
        parameter = next(model.parameters())
        self.dtype = parameter.dtype
        self.stacked = bool(config.cross_layers and not model.parallel)
        self.vectors, constants = parameter.new_empty((0, d)).double(), parameter.new_empty(0).double()
        if config.cross_layers:
            self.vectors, constants = dots_and_constants(model)
        self.base = torch.zeros_like(constants)[None]
        found = linear_layers(model.deep)
        layers, biases = [weight for weight, _ in found], [bias for _, bias in found]
        head, bias = model.logits.weight.detach(), model.logits.bias
        if self.stacked:
            self.base[:, -1] = 1  # q = 1: what comes out is α_L
            if model.cross.bias is not None:
                biases[0] = biases[0] + layers[0] @ model.cross.bias.detach().double().sum(0).to(self.dtype)
        self.constants, self.base = constants.to(self.dtype), self.base.to(self.dtype)
        self.layers: list[Linear] = []
        self.bias = parameter.new_empty(0)  # of the first layer
        self.first = parameter.new_empty((0, d))
        if layers:
            # In parallel the bias of the logits is one of the constants.
            last = None if bias is None or (config.cross_layers and not self.stacked) else bias.detach()
            columns = head.shape[1] - len(layers[-1])
            self.first, self.bias = layers[0], biases[0]
            self.layers = [Linear(*layer, relu=True) for layer in zip(layers[1:], biases[1:], strict=True)]
            self.layers.append(Linear(head[:, columns:].contiguous(), last))


def _open(model: Any) -> tuple[DCN, Encoder | None]:
    """The model and, of a trained run, its encoder."""
    if isinstance(model, str | PathLike):
        from fastcross.training.run_folder import load_model

        model = load_model(Path(model))
    if hasattr(model, "run_"):  # a fitted estimator
        model = model.run_.trained
    network, encoder = (model, None) if isinstance(model, nn.Module) else (model.model, model.encoder)
    if not isinstance(network, DCN):
        raise ValueError(f"a ranker needs a DCN; got {type(network).__name__}")
    return network, encoder


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a ranker's file."""
    from safetensors import safe_open

    if reason := damage(path):
        raise ValueError(f"{path} is damaged: {reason}")
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds no ranker: its format is {metadata.get('format')}, not {FORMAT}")
        # Copies: what is mapped changes with the file, and is gone with it.
        return metadata, {name: file.get_tensor(name).clone() for name in ("cross", "hidden", "keys")}


def as_table(rows: Any) -> pa.Table:
    """A table of Arrow, pandas or polars, or a mapping of columns."""
    import pyarrow as pa

    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Mapping):
        return pa.table({name: pa.array(values, from_pandas=True) for name, values in rows.items()})
    if hasattr(rows, "to_arrow"):  # polars
        return rows.to_arrow()
    if hasattr(rows, "to_dict"):  # pandas
        return pa.Table.from_pandas(rows, preserve_index=False)
    raise TypeError(f"a table must be one of Arrow, pandas or polars, or a mapping; got {type(rows).__name__}")


def _inputs(encoder: Encoder) -> tuple[str, ...]:
    """The columns that are read, weights of bags among them."""
    return (*encoder.columns.inputs, *encoder.columns.weights.values())


def _features_of(encoder: Encoder, columns: Sequence[str]) -> list[int]:
    """The features, numbered in the order of x0, that are made of these columns."""
    if not columns:
        raise ValueError(f"the items have none of the model's columns: {', '.join(_inputs(encoder))}")
    for bag, weight in encoder.columns.weights.items():
        if (bag in columns) != (weight in columns):
            raise ValueError(f"the column {bag} and its weights {weight} must be the items' or the context's, both")
    return [f for f, name in enumerate(encoder.schema.names) if encoder.columns.source_of(name) in columns]


def _no_rows(part: _Part) -> Batch:
    single, bags, dense = part.counts
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(torch.empty(0, dense), nothing.view(0, 1).expand(0, single), (Bag(nothing, nothing),) * bags)


def _extended(store: Tensor, count: int, more: Tensor) -> Tensor:
    """The store with more rows after the first ``count``; it grows by doubling, so that adding one item is cheap."""
    needed = count + len(more)
    if store.dim() != 2 or len(store) < needed:
        old, store = store, more.new_empty((max(needed, 2 * count), more.shape[1]))
        store[:count] = old[:count] if count else store[:0]
    store[count:needed] = more
    return store


def digest(model: nn.Module, encoder: Encoder | None) -> str:
    """By which a model is known again: all of its numbers, and its encoder."""
    found = hashlib.sha256(("" if encoder is None else encoder.fingerprint).encode())
    for name, t in model.state_dict().items():
        content = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        found.update(f"{name} {tuple(t.shape)} {t.dtype} {zlib.crc32(content)}".encode())
    return found.hexdigest()
