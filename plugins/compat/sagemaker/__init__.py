"""The contract of SageMaker's containers: /invocations and /ping, multi-model routes, event streams."""
