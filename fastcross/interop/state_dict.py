"""Checkpoints of other packages' cross networks, as the state_dict of a :class:`fastcross.CrossNetwork`."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from fastcross.layers.peers import PEERS, VECTOR, Peer

FORMATS = (
    Peer("fastcross.CrossNetwork", VECTOR, {"weight": "weight", "bias": "bias"}),
    *(peer for peer in PEERS if peer.formula is VECTOR),
)


def cross_state_dict(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of a :class:`fastcross.CrossNetwork`, from the checkpoint of any package in ``PEERS``.

    Args:
        state_dict: a checkpoint of a cross network, or of a whole model.
        prefix: the prefix of the cross network's keys, such as ``"crossnet."``.

    Returns:
        ``{"weight": (L, d), "bias": (L, d)}``.
    """
    found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    peer = max(FORMATS, key=lambda peer: len(_layers(peer.keys.values(), found)))
    layers = _layers(peer.keys.values(), found)
    if not layers:
        prefixes = sorted({p for key in state_dict for p in _prefixes(key)})
        hint = f"; there are some under {', '.join(map(repr, prefixes))}" if prefixes else ""
        raise ValueError(f"no keys of a cross network under the prefix {prefix!r}, of {len(state_dict)} keys{hint}")
    num_layers = max(layers) + 1
    expected = peer.state_keys({"L": num_layers})
    # RecBole's cross network is part of its model, so other keys of the model have the same prefix.
    mine = found if peer.method == "forward" else [key for key in found if key.startswith("cross_layer_")]
    missing = [prefix + key for key in expected if key not in found]
    extra = [prefix + key for key in mine if key not in expected]
    if missing or extra:
        raise ValueError(f"not a cross network's keys: missing {_listed(missing)}; extra {_listed(extra)}")
    tensors = {
        name: [found[key.format(layer)] for layer in range(num_layers)] if "{}" in key else found[key]
        for name, key in peer.keys.items()
    }
    shapes = ", ".join(f"{prefix + key} {tuple(found[key].shape)}" for key in expected)
    try:
        cross = peer.stacked(tensors)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"the layers have different shapes: {shapes}") from error
    if cross["weight"].shape != cross["bias"].shape:
        raise ValueError(f"not one vector per layer: {shapes}")
    return cross


def _layers(templates: Iterable[str], keys: Iterable[str]) -> list[int]:
    """The layer number in each of the keys that fits one of the templates."""
    pattern = "|".join(re.escape(template).replace(r"\{\}", r"(\d+)") for template in templates)
    matches = [match for key in keys if (match := re.fullmatch(pattern, key))]
    return [int(match[match.lastindex] if match.lastindex else 0) for match in matches]


def _prefixes(key: str) -> Iterable[str]:
    """The possible prefixes of a key that ends like a cross network's weight."""
    ends = [key[dot.end() :] for dot in re.finditer(r"\.", key)]
    return (key.removesuffix(end) for end in ends if _layers((peer.keys["weight"] for peer in FORMATS[1:]), [end]))


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "none"
