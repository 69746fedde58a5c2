"""From admission to the reply: lanes, batches, the queue's producer, readiness."""
