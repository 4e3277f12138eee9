"""``fastcross doctor --tune`` with a stand-in for the clock: what is timed, checked, chosen, kept and then run.

On a GPU, or in Triton's interpreter, where ``test_triton_interpreter.py`` runs this file.
"""

from triton_place import MARKS

from fastcross import plans
from fastcross.accuracy import BY_NAME, held_to_the_rule
from fastcross.kernels.gpu import launch, measured
from fastcross.plans import Shape, table, tune

pytestmark = MARKS
SHAPE = Shape("cross_network", 9, 130, 2)


def last_is_fastest(steps):
    """Seconds that fall from each tile to the next; every step is called."""
    for step in steps.values():
        step()
    return {name: [1.0 + len(steps) - i] * 3 for i, name in enumerate(steps)}


def test_the_fastest_is_chosen_kept_and_run(device, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "FEW", 3)
    told = []
    found = list(tune(SHAPE, device, last_is_fastest, told.append))
    assert not told
    assert [entry.kernel for entry in found] == ["cross_network_fwd", "cross_network_bwd"]
    for entry in found:
        ranked = plans._candidates(entry.key, launch.hardware_of(device))
        assert [entry.model_tile, entry.tile] == [ranked[0].tile, ranked[-1].tile]
        assert (entry.model_seconds, entry.seconds, entry.rows) == (1.0 + len(ranked), 2.0, 9)
    assert "2.00" in table(found)
    measured.write("A GPU", found)
    chosen = []
    monkeypatch.setattr(launch.Plan, "segments", lambda plan, d: chosen.append(plan.tile) or -(-d // plan.columns))
    operator = BY_NAME[SHAPE.operator]
    with launch.using(device, measured.tiles_of("A GPU")):
        compared = held_to_the_rule(operator, operator.draw(*SHAPE[1:5], device), "triton")
    assert all(each.is_right for each in compared)
    assert {entry.tile for entry in found} == set(chosen)


def test_a_tile_that_is_wrong_or_cannot_run_is_left_out(device, monkeypatch):
    monkeypatch.setattr(plans, "FEW", 3)
    told, timed = [], []

    def check(operator, tensors, backend):
        ((key, tile),) = launch.hardware_of(device).measured.tiles.items()
        ranked = plans._candidates(key, launch.hardware_of(device))
        if tile == ranked[1].tile:
            raise RuntimeError("out of resource: shared memory\nand more")
        found = held_to_the_rule(operator, tensors, backend)
        return [found[0]._replace(error=1.0)] if tile == ranked[2].tile else found

    def timer(steps):
        timed.append(set(steps))
        return last_is_fastest(steps)

    monkeypatch.setattr(plans, "held_to_the_rule", check)
    found = list(tune(SHAPE, device, timer, told.append))
    assert timed == [{str(entry.model_tile)} for entry in found]
    assert len(found) == 2
    assert [line.partition("left out: ")[2][:28] for line in told] == [
        "RuntimeError: out of resourc", "result 0 of cross_network: e",
    ] * 2  # fmt: skip
