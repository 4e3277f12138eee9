"""The house: imports point one way, signatures stay short, ``import fastcross`` stays light.

Imports inside functions, under TYPE_CHECKING and by importlib count as all others do.
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From the ground up: a room may import those below it, never its neighbours or what stands above.
FLOORS = (
    ("_version", "defaults", "extras", "fields", "files"),
    ("batch", "kernels", "reference"),
    ("ops",),
    ("accuracy", "layers"),
    ("data", "models", "optim", "polynomial"),
    ("explain", "interop", "training"),
    ("distributed", "doctor", "estimators", "plans", "serving", "tuning"),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor}
FACADE = "fastcross"  # what users import; nothing inside does
HEAVY = ("triton", "pyarrow", "matplotlib", "tqdm", "fastcross.data", "fastcross.training")
COMPILERS = {"jit", "inline"}  # decorators of functions that take their arguments in registers


def sources(*folders):
    """The Python files of these folders, each once: fastcross/kernels is a link to kernels."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path == path.resolve()]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(((FACADE,) if parts[0] == "kernels" else ()) + parts).removesuffix(".__init__")


MODULES = {name_of(path): ast.parse(path.read_text()) for path in sources("fastcross", "kernels")}


def imported(tree):
    """Every module that is imported: ``from fastcross.ops import backends`` is fastcross.ops.backends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES or node.module == "torch" else node.module for name in names)
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value != FACADE:
            yield node.value  # for importlib.import_module


IMPORTS = {module: set(imported(tree)) for module, tree in MODULES.items()}


def room(module):
    return module.split(".")[1] if "." in module else FACADE


def test_every_room_has_its_floor():
    assert {room(module) for module in MODULES} - {FACADE} == set(HEIGHT)


def test_nothing_imports_upward():
    inside = [
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if other.split(".")[0] == FACADE and module != FACADE and room(other) != room(module)
    ]
    assert inside
    assert [(a, b) for a, b in inside if room(b) == FACADE or HEIGHT[room(b)] >= HEIGHT[room(a)]] == []


def test_no_module_imports_itself_in_a_circle():
    tuple(
        graphlib.TopologicalSorter(
            {module: others & MODULES.keys() for module, others in IMPORTS.items()}
        ).static_order()
    )


def test_kernels_know_nothing_of_modules_and_autograd():
    kernels = {module: tree for module, tree in MODULES.items() if room(module) == "kernels"}
    used = {(m, other) for m in kernels for other in IMPORTS[m] if other.startswith(("torch.nn", "torch.autograd"))}
    for module, tree in kernels.items():
        attributes = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        used |= {(module, name) for name in attributes if name.startswith(("torch.nn.", "torch.autograd"))}
    assert {(module, name) for module, name in used if name != "torch.nn.functional"} == set()


def test_the_command_line_parses_and_nothing_else_does():
    assert {room(module) for module, others in IMPORTS.items() if "argparse" in others} == {"cli"}
    reached = {
        room(other) for module in MODULES if room(module) == "cli" for other in IMPORTS[module] if other in MODULES
    }
    assert reached.isdisjoint({"kernels", "ops", "layers"})


def test_import_is_light():
    """By itself; and, with every public name looked up, it adds nothing heavy to what PyTorch brings along."""
    names = "[getattr(fastcross, name) for name in fastcross.__all__]"
    for script in (
        "before = set(); import fastcross",
        f"import torch; before = {{*sys.modules}}; import fastcross; {names}",
    ):
        ask = f"import sys; {script}; print([name for name in {HEAVY} if name in {{*sys.modules}} - before])"
        run = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[]"


FILES = sources("fastcross", "kernels", "tests", "benchmarks", "examples")


def is_compiled(function):
    decorators = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    return any(ast.unparse(node).split(".")[-1] in COMPILERS for node in decorators)


GIVEN = {  # signatures of operators, aten's and ours
    "embedding_bag", "_fake_bwd", "cross_low_rank_bwd", "product_bwd", "fcn_fwd", "fcn_bwd",
}  # fmt: skip


def test_calls_can_be_read_without_counting():
    nodes = ((path, node) for path in FILES for node in ast.walk(ast.parse(path.read_text())))
    functions = [(path, node) for path, node in nodes if isinstance(node, ast.FunctionDef) and node.name not in GIVEN]
    host = [(path, function) for path, function in functions if not is_compiled(function)]
    assert host
    assert [f"{path.name}: {f.name}" for path, f in host if len(f.args.posonlyargs) + len(f.args.args) > 8] == []
