"""What --help says beside the options: what the command is for, and examples to copy."""

DESCRIPTION = """Train, evaluate and compare Deep & Cross Networks on click logs and tables.

first steps:
  fastcross train                               train DCN on a generated click log with planted crosses
  fastcross compare --models dcn,dnn,fm,lr      the paper's table 1 for the same log
  fastcross train --data train.txt.gz           your log in Criteo's format; then, with the folder it names:
  fastcross evaluate runs/NAME                  metrics on the test part
  fastcross predict runs/NAME new.txt --output predictions.csv
  fastcross explain runs/NAME                   which crosses it learned
  fastcross export runs/NAME --output model.onnx
"""

EXAMPLES = {
    "prepare": """examples:
  fastcross prepare day_0.gz --cache day_0.cache
  fastcross prepare train.txt --cache criteo.cache --min-frequency 10 --split time
  fastcross prepare covtype.csv.gz --format covertype --split random:0.9,0,0.1 --cache covtype.cache
  fastcross prepare table.parquet --label clicked --cache table.cache
  fastcross prepare ratings.csv --label liked --categorical user,film --multi 'genres:|' --drop row \\
                    --split time --time-column seen_at --cache ratings.cache

What each column was taken for, and why, is printed; options say otherwise.""",
    "train": """examples:
  fastcross train                                        the embedded default, DCN
  fastcross train --data day_0.cache --run runs/first    a cache made by fastcross prepare
  fastcross train --data ratings.csv --label liked --categorical user,film
  fastcross train --data train.txt --cross-layers 6 --deep-layers 1024,1024 --lr 1e-4 --evaluate-every 2000
  fastcross train --data covtype.csv.gz --format covertype --split 0.9 --cross-layers 8 --deep-layers 292x6 \\
                  --schedule cosine --epochs 30
  fastcross train --resume runs/first                    continue after a crash or Ctrl-C, bit for bit
  fastcross train --processes 2 --data day_0.cache       with the tables divided between two processes""",
    "evaluate": """examples:
  fastcross evaluate runs/first                    the test part of the data it was trained on
  fastcross evaluate runs/first --part validation
  fastcross evaluate runs/first --data day_8.gz    a new labelled file""",
    "predict": """examples:
  fastcross predict runs/first new.txt --output predictions.csv
  fastcross predict runs/first new.txt --output predictions.parquet --on-error skip
  fastcross predict runs/first new.csv --output predictions.csv --id-column user
  fastcross predict runs/first new.txt --output predictions.npy   probabilities alone, a column for each class if many

The output has a row for each row of the input, in its order: its number, its id, the probability of the second of two
classes or of each class, and the likeliest class where they have names. A row that was skipped has its number alone.
Exit code 1: a part of the input was lost (a file that breaks off, with --on-error skip).""",
    "explain": """examples:
  fastcross explain runs/first                     share of variance by degree, heat map, top crosses, one example
  fastcross explain runs/first --data day_8.gz --row 17 --output page""",
    "export": """examples:
  fastcross export runs/first --output model.onnx    raw values in, probabilities out, in onnxruntime alone
  fastcross export runs/first --output model.pt2     compiled for this kind of machine; and model.encoder/
  fastcross export runs/first --output model.onnx --encoded    ids in, logits out, and model.encoder/

docs/serving.md says what goes in, and has a reader for model.encoder/ that needs neither fastcross nor PyTorch.""",
    "extend": """examples:
  fastcross extend runs/first --data today.csv --epochs 1 --run runs/second
  fastcross extend runs/first --data today.csv --min-frequency 5 --run runs/first    replaced when all is done

Old ids and all else that was learned stay; a new id starts as the out-of-vocabulary id, which it was until now.
Training options that are not given are those of RUN. A run that was killed continues with fastcross train --resume.""",
    "compare": """examples:
  fastcross compare --models dcn,dnn                          the demonstration: generated log, curves, Bayes optimum
  fastcross compare --data criteo.cache --seeds 0,1,2         mean ± standard deviation over three seeds
  fastcross compare --data train.txt --models wide_deep,lr --cross C1,C3 --cross C2,C4
  fastcross compare --data train.txt --models lr,wide_deep --crosses auto:20     the crosses that a DCN finds""",
    "tune": """examples:
  fastcross tune --trials 20                                       DCN in the paper's space, on the generated log
  fastcross tune --data criteo.cache --model dcn,dnn --budget 2h --seeds 10 --study study
  fastcross tune --data criteo.cache --grid --space space.json --study grid
  fastcross tune --resume study --trials 40     after Ctrl-C, for more trials, or as a second process at the same time

A space is a JSON file: for each model its parameters, each a list of values or a range:
  {"dcn": {"hidden_layers": [2, 3], "hidden_size": [32, 64], "cross_layers": {"low": 1, "high": 6},
           "lr": {"low": 1e-4, "high": 1e-3, "log": true, "grid": [1e-4, 3e-4, 1e-3]}}}""",
    "paper": """examples:
  fastcross paper --study study                             tables 1 to 4 and figure 3 of a study that tune made
  fastcross paper --study study --beside criteo --output docs/criteo
  fastcross paper --runs runs/dcn-* runs/dnn-* --beside covertype --output docs/covertype

Runs that differ in their seed alone become one line, mean ± deviation; those that are not finished are left out, and
the same command later takes them in.""",
    "convert": """examples:
  fastcross convert runs/sharded runs/single --to single     then: fastcross train --resume runs/single
  fastcross convert runs/single runs/sharded --to sharded    then: fastcross train --resume runs/sharded""",
    "info": """examples:
  fastcross info                versions, and what can run here
  fastcross info runs/first     what a run was asked for and what came out
  fastcross info day_0.cache    columns, cardinalities and rows of a cache""",
}
