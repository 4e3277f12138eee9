"""Tables as users have them, for the tests of what is served: bags with and without weights, gaps, ids never seen."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBERS = ("age", "minutes")
GENRES = ("Drama", "Comedy", "Sci-Fi", "Film-Noir", "Children's", "Krimi/Ö", "")
COLUMNS = {
    "label": "rating",
    "dense": ["age", "minutes"],
    "categorical": ["user", "film", "country", "probability"],
    "bags": ["genres", "tags"],
    "weights": {"tags": "weight"},
    "separators": {"tags": " "},
    "datetimes": ["seen_at"],
}


def write_movies(path, rows, seed=0, new=0, films=40):
    """Ratings of films; ``new``: ids among users, films and tags that the first of these tables has not."""
    rng = np.random.default_rng(seed)

    def rarely(value, share=0.1):
        return "" if rng.random() < share else value

    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "rating",
                "user",
                "film",
                "genres",
                "tags",
                "weight",
                "age",
                "minutes",
                "seen_at",
                "country",
                "probability",
            ]
        )
        for _ in range(rows):
            film = rng.integers(films + new)
            tags = [f"t{tag}" for tag in rng.integers(0, 12 + new, rng.integers(4))]
            day, hour = rng.integers(1, 29), rng.integers(24)
            row = [
                (film % 3 + rng.integers(2)) % 3,
                f"u{rng.integers(20 + new)}",
                film,
                "|".join(rng.choice(GENRES, rng.integers(4))),
                " ".join(tags),
                " ".join(f"{weight:.2f}" for weight in rng.random(len(tags))),
                rarely(rng.integers(5, 90)),
                rarely(f"{rng.normal(1.6e9, 1e6):.3f}", 0.05),  # far from 0: float32 would round it
                rarely(f"2024-{rng.integers(1, 13):02}-{day:02} {hour:02}:{rng.integers(60):02}:00", 0.05),
                rng.choice(["DE", "FR", "NA", ""]),
                rng.choice(["likely", "unlikely"]),
            ]
            writer.writerow(row)


def rows_of(path):
    """As a client has them: numbers as numbers, nothing as None."""
    with open(path, newline="") as file:
        read = [*csv.DictReader(file)]
    return [
        {n: (float(v) if v else None) if n in NUMBERS else v for n, v in row.items() if n != "rating"} for row in read
    ]


# Runs a script where nothing can be imported but Python's own modules and the packages that are named.
ALONE = """
import runpy, sys

class OnlyThese:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        own = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not own and top not in allowed:
            raise ModuleNotFoundError(f"{name} is not on the serving machine")

allowed = sys.argv[1].split(",")
sys.meta_path.insert(0, OnlyThese())
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(packages, script, *arguments):
    """The output of one of the examples in a process that has these packages alone."""
    command = [sys.executable, "-I", "-c", ALONE, ",".join(packages), EXAMPLES / script, *arguments]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime:" not in done.stderr  # its warnings
    return done.stdout
