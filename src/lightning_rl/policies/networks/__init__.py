"""Networks: perceptrons, encoders, memories and Q ensembles."""
