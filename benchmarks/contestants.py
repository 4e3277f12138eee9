"""Who competes: an object each. Workloads and tables read its attributes; the name is only what is printed."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Peer:
    """Another package's cross network: the path of its class, and what it is built with."""

    path: str
    sizes: str = "dL"  # as for an operator's operands
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Contestant:
    """One way to do a workload. What a workload has no use for it leaves alone: an operator has no optimiser."""

    name: str
    backend: str = "auto"  # of fastcross; "reference" is the paper's equations layer by layer, the eager loop
    peer: Peer | None = None  # whose own module computes in fastcross's place
    swapped: bool = False  # the peer's module after fastcross.swap
    compiled: bool = False  # by torch.compile
    exported: bool = False  # written to a file, loaded again
    graph: bool = False  # replayed as a CUDA graph; left out where there is no GPU
    floor: str | None = None  # no contestant but a bound: "copy" of x0, an "empty" autograd.Function, the "products"
    cross: bool = True  # False: the model without its cross network, a DNN
    lazy_adam: bool = True  # Adam on the embedding rows of the batch (fastcross.optim); False: on whole tables
    layers: int | None = None  # in place of the workload's, for depths against each other
    cardinality: int | None = None  # in place of the workload's, for heights of tables against each other


OURS = Contestant("fastcross")
CLOSED_FORM = Contestant("closed form", backend="torch")
PLAIN = Contestant("plain PyTorch", backend="torch")
EAGER = Contestant("eager loop", backend="reference")
COMPILED = Contestant("torch.compile", backend="reference", compiled=True)
GRAPHS = (
    replace(OURS, name="fastcross, CUDA graph", graph=True),
    replace(EAGER, name="eager loop, CUDA graph", graph=True),
)
COPY = Contestant("copy of x0", floor="copy")
EMPTY = Contestant("empty autograd.Function", floor="empty")

PRODUCTS = Contestant("GEMMs alone", floor="products")

# As the packages come: their Adam updates whole tables.
DEEPCTR = Contestant("DeepCTR-Torch", peer=Peer("deepctr_torch.layers.interaction.CrossNet"), lazy_adam=False)
TORCHREC = Contestant("TorchRec", peer=Peer("torchrec.modules.crossnet.VectorCrossNet"), lazy_adam=False)
FUXICTR = Contestant("FuxiCTR", peer=Peer("fuxictr.pytorch.layers.interactions.cross_net.CrossNet"), lazy_adam=False)
TORCHFM = Contestant("torchfm", peer=Peer("torchfm.layer.CrossNetwork"), lazy_adam=False)
PEERS = (DEEPCTR, TORCHREC, FUXICTR, TORCHFM)


def _of_the_family(package: Contestant, name: str, sizes: str = "dL", **options: object) -> Contestant:
    """Another network of the package: the class ``name`` beside its rank-one network."""
    assert package.peer is not None
    path = f"{package.peer.path.rpartition('.')[0]}.{name}"
    return replace(package, peer=Peer(path, sizes, tuple(options.items())))


FAMILY_PEERS = {
    "cross_matrix": (
        _of_the_family(DEEPCTR, "CrossNet", parameterization="matrix"),
        _of_the_family(TORCHREC, "CrossNet"),
        _of_the_family(FUXICTR, "CrossNetV2"),
    ),
    "cross_low_rank": (_of_the_family(TORCHREC, "LowRankCrossNet", "dLr"),),
    # The gates' gradient of TorchRec's mixture is beyond the rule at d = 429, by a tenth.
    "cross_mixture": (
        _of_the_family(DEEPCTR, "CrossNetMix", "drKL"),
        _of_the_family(FUXICTR, "CrossNetMix", "dLrK"),
    ),
}

# Whole models.
DNN = Contestant("DNN alone", cross=False)
EXPORTED = Contestant("fastcross, exported", exported=True)
WHOLE_TABLE_ADAM = replace(OURS, name="fastcross, whole-table Adam", lazy_adam=False)


def swapped(contestant: Contestant) -> Contestant:
    return replace(contestant, name=f"{contestant.name}, swapped", swapped=True)


def same_adam(contestant: Contestant) -> Contestant:
    """A peer's model with fastcross's optimiser: its tables give sparse gradients, and only their rows are updated."""
    return replace(contestant, name=f"{contestant.name}, same Adam", lazy_adam=True)


def deep(contestant: Contestant, layers: int) -> Contestant:
    return replace(contestant, name=f"{contestant.name}, L = {layers}", layers=layers)


def high(contestant: Contestant, cardinality: int) -> Contestant:
    return replace(contestant, name=f"{contestant.name}, {cardinality:,} ids", cardinality=cardinality)


def everyone(*peers: Contestant, compiled: bool = True) -> tuple[Contestant, ...]:
    """The contestants of an operator, these peers among them.

    ``compiled``: torch.compile, too, which takes ten seconds and more to begin.
    """
    return (OURS, CLOSED_FORM, EAGER, *((COMPILED,) if compiled else ()), *GRAPHS, *peers, COPY)
