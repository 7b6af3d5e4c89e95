"""What is predicted, on what: models, devices, backends, workloads; frozen values read strictly, no torch."""
