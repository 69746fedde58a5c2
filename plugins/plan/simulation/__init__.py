"""A fleet under a virtual clock: the code that decides in gateways, workers and the controller, without any of them."""
