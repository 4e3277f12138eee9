"""scikit-learn's estimators over the same data, training and run folder that the command line uses."""

from fastcross.extras import needs

try:
    import sklearn as sklearn
except ModuleNotFoundError as error:
    if error.name != "sklearn":
        raise
    raise ImportError(needs("an estimator", "sklearn")) from None
