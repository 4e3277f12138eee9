#!/usr/bin/env bash
# A click log, from the command line: train, evaluate, predict, explain, export.
# For a file of your own in Criteo's format, CSV or Parquet: `--data train.txt.gz` in place of `--rows`.
set -euo pipefail

# Without --data, fastcross generates a log whose best possible logloss is known.
fastcross train --rows 60000 --cache log --run runs/first --epochs 2 --lr 0.01 \
    --cross-layers 2 --deep-layers 32 --embedding-dim 4

fastcross evaluate runs/first                                   # logloss, AUC, accuracy, calibration
head -n 1000 log/clicks.txt > new.txt                           # any file like the one trained on
fastcross predict runs/first new.txt --output predictions.csv   # one probability per row
fastcross explain runs/first --output page                      # the crosses it learned
fastcross export runs/first --output model.onnx                 # raw values in, probabilities out
