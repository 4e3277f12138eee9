#!/usr/bin/env bash
# A click log, from the command line: train, evaluate, predict, explain, export.
# With a file of your own, put `--data train.txt.gz` in place of `--rows 60000`: Criteo's format, CSV or Parquet.
set -euo pipefail

# Without --data, fastcross generates a log whose best possible logloss is known.
fastcross train --rows 60000 --cache log --run runs/first --cross-layers 2 --deep-layers 32 --embedding-dim 4 \
    --epochs 2 --lr 0.01

fastcross evaluate runs/first                                       # logloss, AUC, accuracy, calibration
head -n 1000 log/clicks.txt > new.txt                               # any file like the one trained on
fastcross predict runs/first new.txt --output predictions.csv       # one probability per row
fastcross explain runs/first --output page                          # page/index.html: fields and pairs of fields
fastcross export runs/first --output model.onnx                     # raw values in, probabilities out
