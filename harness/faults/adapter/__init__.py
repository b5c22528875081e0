"""What is wrong between the engine and its callers: answers and outputs on their way."""
