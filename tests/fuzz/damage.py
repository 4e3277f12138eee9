"""Damage to every file that a run and a cache own: an error that names the file, or the very same results."""

import os
import shutil

from fuzz import draw, workload

KEPT = {}  # what the commands answer when nothing is damaged, by worker folder


def prepare(folder):
    workload.make(folder)


def case(number, folder):
    rng = draw.start(number)
    own = workload.copied(folder, "damage", "cache", "finished", "unfinished", "new.csv")
    owner = rng.choices(("finished", "cache", "unfinished"), (10, 10, 1))[0]
    files = sorted(path for path in (own / owner).rglob("*") if path.is_file() and path.name != ".lock")
    victim = rng.choice(files)
    action = rng.choice(ACTIONS[owner])
    expected = KEPT.get((own, action)) or KEPT.setdefault((own, action), action(own))
    if expected[0]:
        raise AssertionError(f"{action.__name__} fails on what is whole: {expected}")
    content = victim.read_bytes()
    how = damage(rng, victim, content)
    try:
        code, said, results = action(own)
    finally:
        victim.write_bytes(content)
    name = str(victim.relative_to(own))
    if code:
        # A folder's file may be named by its path in the folder; a missing one by the folder that should have it.
        named = (victim.name, *((victim.parent.name,) if how == "removed" else ()))
        if not any(each in said for each in named) or "Traceback" in said or "defect of fastcross" in said:
            raise AssertionError(f"{name} {how}: {action.__name__} fails, and does not name it: {said.strip()[-500:]}")
        return f"{name}: named"
    if results != expected[2]:
        raise AssertionError(f"{name} {how}: {action.__name__} returns 0 and other results")
    return f"{name}: same results"


def damage(rng, path, content):
    """Changes the file in place; returns what was done."""
    kind = rng.choices(("bit", "byte", "cut", "longer", "zeros", "removed"), (60, 15, 10, 5, 5, 5))[0]
    if not content and kind not in ("longer", "removed"):
        kind = "longer"
    if kind == "removed" and path.name == "result.json":  # without it a run is just not finished, which is no damage
        kind = "bit"
    if kind == "removed":
        path.unlink()
        return kind
    position = rng.randrange(len(content)) if content else 0
    new = bytearray(content)
    if kind == "bit":
        new[position] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        new[position] = (new[position] + rng.randint(1, 255)) % 256
    elif kind == "cut":
        del new[position:]
    elif kind == "longer":
        new += bytes(rng.randrange(256) for _ in range(rng.randint(1, 64)))
    else:
        end = min(len(new), position + rng.randint(1, 4096))
        if not any(new[position:end]):
            new[position] ^= 255
        else:
            new[position:end] = bytes(end - position)
    path.write_bytes(bytes(new))
    return f"{kind} at {position}"


def evaluate(own):
    arguments = ("evaluate", "finished", "--data", "cache", "--output", "metrics.json")
    code, printed, said = workload.in_process(own, *arguments)
    return code, said, (printed, _taken(own / "metrics.json"))


def predict(own):
    code, printed, said = workload.in_process(own, "predict", "finished", "new.csv", "--output", "new.npy")
    return code, said, (printed, _taken(own / "new.npy"))


def info(own):
    code, printed, said = workload.in_process(own, "info", "finished")
    return code, said, printed


def info_of_cache(own):
    code, printed, said = workload.in_process(own, "info", "cache")
    return code, said, printed


def read_cache(own):
    """Every array of every part."""
    from fastcross.data import Cache

    try:
        cache = Cache.open(own / "cache")
        found = []
        for part in ("train", "validation", "test"):
            for batch in cache.batches(part, 64):
                tensors = [batch.dense, batch.categorical, batch.label]
                tensors += [t for bag in batch.bags for t in (bag.values, bag.offsets)]
                found += [t.numpy().tobytes() for t in tensors]
    except (ValueError, OSError) as error:
        return 2, str(error), None
    return 0, "", found


def resume(own):
    """The unfinished run to its end, on a copy."""
    copy = own / "resumed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(own / "unfinished", copy)
    code, _, said = workload.in_process(own, "train", "--resume", "resumed")
    results = None if code else workload.outcome(copy)
    shutil.rmtree(copy)
    return code, said, results


def _taken(path):
    if not path.exists():
        return None
    content = path.read_bytes()
    os.unlink(path)
    return content


ACTIONS = {
    "finished": (evaluate, predict, info),
    "cache": (read_cache, read_cache, evaluate, info_of_cache),
    "unfinished": (resume,),
}
