"""scikit-learn's estimators over the same data, training and run folder that the command line uses."""
