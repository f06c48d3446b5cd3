"""What a person uses: the command line, the scikit-learn estimator, reports, saved models."""
