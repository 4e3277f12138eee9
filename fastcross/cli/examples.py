"""What ``--help`` says beside the options: the first steps, and examples of each command."""

DESCRIPTION = """Train, evaluate and compare Deep & Cross Networks on click logs and tables.

first steps:
  fastcross train                               train DCN on a generated click log with planted crosses
  fastcross compare --models dcn,dnn,fm,lr      the paper's table 1 for the same log
  fastcross train --data train.txt.gz           your log in Criteo's format; then, with the folder that it prints:
  fastcross evaluate runs/NAME                  metrics on the test part
  fastcross predict runs/NAME new.txt --output predictions.csv
  fastcross explain runs/NAME                   which crosses it learned
  fastcross export runs/NAME --output model.onnx
  fastcross serve runs/NAME
"""

EXAMPLES = {
    "prepare": """examples:
  fastcross prepare day_0.gz --cache day_0.cache
  fastcross prepare train.txt --cache criteo.cache --min-frequency 10 --split time
  fastcross prepare covtype.csv.gz --format covertype --split random:0.9,0,0.1 --cache covtype.cache
  fastcross prepare table.parquet --label clicked --cache table.cache
  fastcross prepare ratings.csv --label liked --categorical user,film --multi 'genres:|' --drop row \\
                    --split time --time-column seen_at --cache ratings.cache

prepare prints the type of each column and why. Options set other types.""",
    "train": """examples:
  fastcross train                                        DCN on the generated log
  fastcross train --data day_0.cache --run runs/first    a cache made by fastcross prepare
  fastcross train --data ratings.csv --label liked --categorical user,film
  fastcross train --data train.txt --cross-layers 6 --deep-layers 1024,1024 --lr 1e-4 --evaluate-every 2000
  fastcross train --data covtype.csv.gz --format covertype --split 0.9 --preset paper --cross-layers 8 \\
                  --deep-layers 292x6 --schedule cosine --epochs 30
  fastcross train --resume runs/first                    continue after a crash or Ctrl-C, bit for bit
  fastcross train --processes 2 --data day_0.cache       tables divided between two processes""",
    "evaluate": """examples:
  fastcross evaluate runs/first                    the test part of the data it was trained on
  fastcross evaluate runs/first --part validation
  fastcross evaluate runs/first --data day_8.gz    a new labelled file""",
    "predict": """examples:
  fastcross predict runs/first new.txt --output predictions.csv
  fastcross predict runs/first new.txt --output predictions.parquet --on-error skip
  fastcross predict runs/first new.csv --output predictions.csv --id-column user
  fastcross predict runs/first new.txt --output predictions.npy   an array of probabilities, with a column per class

The output has one row per input row, in the same order: its number, its id, the probability of the second of two
classes or of each class, and the likeliest class if classes have names. A skipped row has its number only.
Exit code 1: a part of the input was lost (a truncated file, with --on-error skip).""",
    "explain": """examples:
  fastcross explain runs/first                     share of variance by degree, heat map, top crosses, one example
  fastcross explain runs/first --data day_8.gz --row 17 --output page""",
    "export": """examples:
  fastcross export runs/first --output model.onnx    raw values in, probabilities out, for onnxruntime
  fastcross export runs/first --output model.pt2     compiled for this kind of machine, with model.encoder/
  fastcross export runs/first --output model.onnx --encoded    ids in, logits out, with model.encoder/
  fastcross export runs/first --output model.onnx --fold       the same predictions; without a deep network far smaller

docs/serving.md describes the inputs, and a reader for model.encoder/ that needs neither fastcross nor PyTorch.""",
    "serve": """examples:
  fastcross serve runs/first                                     a page at http://127.0.0.1:8080
  fastcross serve runs/first --items films.csv --key film        also POST /rank
  curl -d '{"rows": [{"user": "u17", "age": 31}]}' localhost:8080/predict
  kill -HUP PID      takes the run, and the items, as they are now; kill PID answers what it has, then ends

docs/serving.md describes the requests, the Open Inference Protocol among them.""",
    "extend": """examples:
  fastcross extend runs/first --data today.csv --epochs 1 --run runs/second
  fastcross extend runs/first --data today.csv --min-frequency 5 --run runs/first    replaces runs/first at the end

Existing ids and parameters stay. A new id starts with the embedding of the out-of-vocabulary id.
Training options that are not given are those of RUN. After a crash, continue with fastcross train --resume.""",
    "compare": """examples:
  fastcross compare --models dcn,dnn                          the generated log, with curves and the Bayes optimum
  fastcross compare --data criteo.cache --seeds 0,1,2         mean ± standard deviation over three seeds
  fastcross compare --data train.txt --models wide_deep,lr --cross C1,C3 --cross C2,C4
  fastcross compare --data train.txt --models lr,wide_deep --crosses auto:20     the crosses that a DCN finds""",
    "tune": """examples:
  fastcross tune --trials 20                                       DCN in the paper's space, on the generated log
  fastcross tune --data criteo.cache --model dcn,dnn --budget 2h --seeds 10 --study study
  fastcross tune --data criteo.cache --grid --space space.json --study grid
  fastcross tune --resume study --trials 40     after Ctrl-C, for more trials, or in a second process
A space is a JSON file: for each model its parameters, each a list of values or a range:
  {"dcn": {"hidden_layers": [2, 3], "hidden_size": [32, 64], "cross_layers": {"low": 1, "high": 6},
           "lr": {"low": 1e-4, "high": 1e-3, "log": true, "grid": [1e-4, 3e-4, 1e-3]}}}""",
    "paper": """examples:
  fastcross paper --study study                             tables 1 to 4 and figure 3 of a study that tune made
  fastcross paper --study study --beside criteo --output docs/criteo
  fastcross paper --runs runs/dcn-* runs/dnn-* --beside covertype --output docs/covertype

Runs that differ only in their seed become one line, mean ± deviation. Unfinished runs are left out; run the command
again to include them.""",
    "convert": """examples:
  fastcross convert runs/sharded runs/single --to single     then: fastcross train --resume runs/single
  fastcross convert runs/single runs/sharded --to sharded    then: fastcross train --resume runs/sharded""",
    "doctor": """examples:
  fastcross doctor                           a few minutes; exit code 1 if a result is wrong
  fastcross doctor --quick --output report   a folder to attach to an issue

TRITON_INTERPRET=1 checks the Triton kernels on a CPU, in Triton's interpreter, and times nothing.""",
    "info": """examples:
  fastcross info                versions, and the backends that can run here
  fastcross info runs/first     a run's options and metrics
  fastcross info day_0.cache    columns, cardinalities and rows of a cache""",
}
