"""Rules: the requirements of models; `genserve.repository.model_validation` lists and runs them."""
