"""The operations a model is made of, and the backends that implement them."""
