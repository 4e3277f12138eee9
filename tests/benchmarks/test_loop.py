"""The benchmark of the training loop runs, and compares what it says that it compares."""

from benchmarks import loop
from tests.training.helpers import assert_same_weights, weights


def test_the_loop_and_its_steps_alone_take_the_same_steps(tmp_path):
    cache = loop.make_cache(tmp_path, 300, 50)
    assert cache.schema.cardinalities == (51,) * loop.FEATURES
    found = []
    for name in (loop.THREAD, loop.NO_THREAD, loop.STEPS):
        trainer = loop.make_trainer(cache, 32, (8,))
        loop.contestants(trainer, 2)[name]()
        assert trainer.step == 2
        found.append(weights(trainer.model))
    assert_same_weights(found[0], found[1])
    assert_same_weights(found[0], found[2])


def test_it_prints_a_ratio_for_each(capsys):
    sizes = {"rows": 300, "ids": 50, "batch": 32, "deep": 8, "steps": 1, "rounds": 1, "runs": 1}
    loop.main([f"--{name}={size}" for name, size in sizes.items()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all("ms per step" in line for line in lines[1:])
    assert "1.000x" in lines[3]
