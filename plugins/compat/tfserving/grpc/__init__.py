"""TensorFlow Serving's PredictionService and ModelService over gRPC."""
